//! Renders Envoy's bootstrap, anew for each epoch.

use crate::base::place::{self, Mode};
use crate::bootstrap::Node;
use crate::config::parts::envoy::Bootstrap;
use crate::envoy;

/// The bootstrap of one node.
pub(super) struct OfNode {
    inputs: Bootstrap,
    node: Node,
    /// What was wrong with what is put over it; told once.
    fault: Option<String>,
}

impl OfNode {
    /// Holds the node.
    pub(super) fn new(inputs: Bootstrap, node: Node) -> Self {
        Self { inputs, node, fault: None }
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

    fn over(&mut self, known: Option<String>) -> Option<String> {
        let (over, fault) = match self.inputs.over() {
            None => (known, None),
            Some(Ok(over)) => (over, None),
            Some(Err(why)) => (known, Some(why.to_string())),
        };
        if let Some(why) = fault.as_ref().filter(|_| fault != self.fault) {
            tracing::warn!("Failed to read bootstrap override: {why}; what was read before stays in use");
        }
        self.fault = fault;
        over
    }
}
