"""Request traces: one form in memory, the file formats that are read, and recording."""
