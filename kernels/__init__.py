"""Device code, and a torch reference for each kernel."""
