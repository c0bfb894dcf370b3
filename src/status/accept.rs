//! Accept.
