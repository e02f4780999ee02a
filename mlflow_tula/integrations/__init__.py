"""Observe training loops that people already have: autologging, Lightning, Hugging Face."""
