"""``ds-muon doctor``: whether this machine, and a DeepSpeed config, are fit for DSMuon; and the config that is."""
