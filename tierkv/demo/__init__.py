"""The demo: a real pretrained model gets the KV cache of real texts back from every tier."""
