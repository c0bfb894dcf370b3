//! Renders Envoy's bootstrap, anew for each epoch.

use crate::base::place::{self, Mode};
use crate::bootstrap::Node;
use crate::config::parts::envoy::Bootstrap;
use crate::envoy;

/// The bootstrap of one node.
pub(super) struct OfNode {
    inputs: Bootstrap,
    node: Node,
}

impl OfNode {
    /// Holds the node.
    pub(super) fn new(inputs: Bootstrap, node: Node) -> Self {
        Self { inputs, node }
    }
}

impl envoy::Bootstrap for OfNode {
    fn render(&mut self) -> Result<Vec<u8>, Box<dyn std::error::Error + Send + Sync>> {
        if let Some((path, token)) = self.inputs.lightstep_token() {
            // Envoy may run as another user and reads it by itself, so the mode is the Go agent's.
            place::put(&path, token.as_bytes(), Mode::Masked(0o666))?;
        }
        Ok(self.inputs.render(self.node.clone())?)
    }
}
