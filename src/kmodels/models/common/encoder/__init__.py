"""Encoders: their block, their configuration, and text encoders made of both."""
