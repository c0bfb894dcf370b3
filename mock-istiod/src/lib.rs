//! Plays istiod.
