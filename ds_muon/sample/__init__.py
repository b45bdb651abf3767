"""What ``verify``, ``bench`` and the demo train where the user names no model: a byte-level GPT, and text for it."""
