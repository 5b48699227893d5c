"""Replaying a trace through the policies that the live store uses: what would have hit, and at what cost."""
