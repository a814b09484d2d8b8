"""What the host knows of a device, and sends to it, so that nobody waits."""
