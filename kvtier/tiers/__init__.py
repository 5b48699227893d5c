"""Places that hold page bytes: slots in VRAM and host RAM, records on disk."""
