"""The main job: trains a byte-level GPT, or the user's own model, through the public API.

An application, not a layer: no other room imports it but the command line."""
