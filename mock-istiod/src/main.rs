//! `mock-istiod`: istiod's two services for demo and tests.

fn main() {}
