"""The host remembers seeds and sends numbers to a device in ways that do not wait for it."""
