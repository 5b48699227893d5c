"""The demo's text and model: everything that 'kvtier run --demo' needs without a download."""
