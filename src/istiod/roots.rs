//! Which root certificates a connection trusts, and reading them.
