//! Extension configs on their way from the relay to the part that fetches Wasm modules, and back.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use prost::Message;

use super::stages::Stages;
use crate::base::error::BoxError;
use crate::base::metrics::Metrics;
use crate::config::Config;
use crate::trouble::Reporter;
use crate::wasm::Converter;
use crate::xds::{self, Convert, Protocol, map_resources};

/// The converter, where conversion is on.
pub(super) fn converter(config: &Config, metrics: &Metrics, trouble: Reporter) -> Option<Arc<Converter>> {
    let wasm = config.wasm.clone()?;
    Some(Arc::new(Converter::new(wasm, config.crypto.clone(), metrics).with_trouble(trouble)))
}

/// Starts what removes unused modules. What the relay keeps for a later Envoy is in use.
pub(super) fn spawn(converter: &Arc<Converter>, xds: &xds::Handle, stages: &Stages) {
    let (converter, xds, stop) = (converter.clone(), xds.clone(), stages.xds.token());
    stages.xds.lasting("wasm modules", async move { converter.purge(stop, || xds.extensions()).await });
}

/// The relay's view of the converter.
#[derive(Debug)]
pub(super) struct Conversion(pub Arc<Converter>);

/// What is read of an incremental response: its `removed_resources`.
#[derive(Clone, PartialEq, prost::Message)]
struct Removed {
    #[prost(string, repeated, tag = "6")]
    names: Vec<String>,
}

impl Convert for Conversion {
    fn convert(&self, protocol: Protocol, response: Bytes) -> BoxFuture<'static, Result<Bytes, BoxError>> {
        let converter = self.0.clone();
        Box::pin(async move {
            let mut resources = Vec::new();
            map_resources(protocol, &response, |resource| {
                resources.push(resource.clone());
                Ok(resource)
            })?;
            if protocol == Protocol::Delta {
                converter.removed(&Removed::decode(response.clone())?.names);
            }
            let whole = protocol == Protocol::Sotw;
            let mut converted = converter.convert(resources, whole).await?.into_iter();
            map_resources(protocol, &response, |resource| Ok(converted.next().unwrap_or(resource)))
        })
    }
}
