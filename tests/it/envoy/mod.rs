//! Envoy's life through the library: a scripted Envoy and a scripted admin port, then a real Envoy.

mod ends;
mod fake;
mod real;
mod restarts;
mod start;
