"""``ds-muon bench``: measurements that users can repeat on their own machines."""
