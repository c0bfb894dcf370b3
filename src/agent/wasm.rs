//! Extension configs on their way from the relay to the part that fetches Wasm modules, and back.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::BoxFuture;

use super::stages::Stages;
use crate::base::error::BoxError;
use crate::base::metrics::Metrics;
use crate::base::wire;
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

/// Extension configs of a response at most, and as many that it removes: a small one has 80 bytes, and takes some kB
/// while it is converted.
const MOST: usize = 16_384;

/// A response that no istiod sends.
#[derive(Debug, thiserror::Error)]
#[error("more than {MOST} extension configs in a response are not converted")]
struct TooMany;

/// The names in an incremental response's `removed_resources`.
fn removed(response: &[u8]) -> Result<Vec<String>, BoxError> {
    const REMOVED: u32 = 6;
    let names = wire::texts(response, REMOVED).take(MOST + 1).collect::<Result<Vec<_>, _>>()?;
    if names.len() > MOST { Err(TooMany.into()) } else { Ok(names) }
}

impl Convert for Conversion {
    fn convert(&self, protocol: Protocol, response: Bytes) -> BoxFuture<'static, Result<Bytes, BoxError>> {
        let converter = self.0.clone();
        Box::pin(async move {
            let mut resources = Vec::new();
            map_resources(protocol, &response, |resource| {
                if resources.len() == MOST {
                    return Err(TooMany.into());
                }
                resources.push(resource.clone());
                Ok(resource)
            })?;
            if protocol == Protocol::Delta {
                converter.removed(&removed(&response)?);
            }
            let whole = protocol == Protocol::Sotw;
            let mut converted = converter.convert(resources, whole).await?.into_iter();
            map_resources(protocol, &response, |resource| Ok(converted.next().unwrap_or(resource)))
        })
    }

    fn dropped(&self) {
        self.0.dropped();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_response_has_so_many_extension_configs_and_no_more() {
        let config = crate::wasm::Config {
            dir: "/nowhere".into(),
            expiry: Default::default(),
            purge_interval: Default::default(),
            http_timeout: Default::default(),
            http_attempts: 0,
            insecure: Vec::new(),
            max_size: 0,
            credentials: Vec::new(),
            proxies: Default::default(),
        };
        let crypto = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let conversion = Conversion(Arc::new(Converter::new(config, crypto, &Metrics::new())));
        // Empty resources, and empty names of removed ones.
        for (protocol, field) in [(Protocol::Sotw, [0x12, 0]), (Protocol::Delta, [0x32, 0])] {
            let why = async |count: usize| {
                let response = conversion.convert(protocol, field.repeat(count).into());
                response.await.err().map(|why| why.to_string()).unwrap_or_default()
            };
            assert!(why(MOST + 1).await.starts_with("more than 16384"), "{protocol:?}");
            assert!(!why(MOST).await.starts_with("more than 16384"), "{protocol:?}");
        }
    }
}
