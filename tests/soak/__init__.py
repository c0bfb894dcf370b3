"""A long run of an agent. See __main__.py."""
