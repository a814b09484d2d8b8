"""Models with an image tower and a text tower: CLIP, SigLIP and SigLIP 2."""
