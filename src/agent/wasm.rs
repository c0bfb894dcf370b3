//! Extension configs on their way from the relay to the part that fetches Wasm modules, and back.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::BoxFuture;

use super::stages::Stages;
use crate::base::error::BoxError;
use crate::base::metrics::Metrics;
use crate::config::Config;
use crate::trouble::Reporter;
use crate::wasm::Converter;
use crate::xds::{Convert, Protocol, map_resources};

/// The converter, where conversion is on.
pub(super) fn converter(config: &Config, metrics: &Metrics, trouble: Reporter) -> Option<Arc<Converter>> {
    let wasm = config.wasm.clone()?;
    Some(Arc::new(Converter::new(wasm, config.crypto.clone(), metrics).with_trouble(trouble)))
}

/// Starts what removes unused modules.
pub(super) fn spawn(converter: &Arc<Converter>, stages: &Stages) {
    let (converter, stop) = (converter.clone(), stages.xds.token());
    stages.xds.lasting("wasm modules", async move { converter.purge(stop).await });
}

/// The relay's view of the converter.
#[derive(Debug)]
pub(super) struct Conversion(pub Arc<Converter>);

impl Convert for Conversion {
    fn convert(&self, protocol: Protocol, response: Bytes) -> BoxFuture<'static, Result<Bytes, BoxError>> {
        let converter = self.0.clone();
        Box::pin(async move {
            let mut resources = Vec::new();
            map_resources(protocol, &response, |resource| {
                resources.push(resource.clone());
                Ok(resource)
            })?;
            let mut converted = converter.convert(resources).await?.into_iter();
            map_resources(protocol, &response, |resource| Ok(converted.next().unwrap_or(resource)))
        })
    }
}
