"""Faults inside: every call that an agent makes fails once. See __main__.py."""
