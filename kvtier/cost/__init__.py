"""What a placement costs: estimates that name their inputs. Needs neither torch nor a device."""
