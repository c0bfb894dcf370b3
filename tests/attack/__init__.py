"""Attacks on an agent, from outside. See __main__.py."""
