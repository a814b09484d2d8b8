"""Masked autoencoders (He et al. 2022): pretraining of a ViT on images without labels."""
