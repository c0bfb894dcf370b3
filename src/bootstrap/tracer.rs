//! The tracer that starts with Envoy; sampling and tags come from istiod later.

use serde_json::{Value, json};

use super::{Options, Tracer, typed};
use crate::base::path;

/// The file of Lightstep's token, in `configPath`.
pub(crate) const TOKEN_FILE: &str = "lightstep_access_token.txt";

/// Where the Lightstep token stands, relative as Envoy sees it: `configPath` and the file's name.
#[must_use]
pub(crate) fn token_file(config_path: &str) -> String {
    path::clean(&format!("{config_path}/{TOKEN_FILE}"))
}

/// The section `tracing`.
pub(crate) fn section(options: &Options) -> Option<Value> {
    let (name, kind, config) = match options.tracer.as_ref()? {
        Tracer::Zipkin { address } if !address.is_empty() => (
            "zipkin",
            "ZipkinConfig",
            json!({
                "collector_cluster": "zipkin",
                "collector_endpoint": "/api/v2/spans",
                "collector_endpoint_version": "HTTP_JSON",
                "trace_id_128bit": true,
                "shared_span_context": false,
            }),
        ),
        Tracer::Lightstep { address } if !address.is_empty() => {
            tracing::warn!(
                "the tracer lightstep is not part of Envoy any more: Envoy refuses to start with it; use zipkin, datadog or \
                 an OpenTelemetry extension provider"
            );
            let token = token_file(&options.config_path);
            (
                "lightstep",
                "LightstepConfig",
                json!({"collector_cluster": "lightstep", "access_token_file": token}),
            )
        }
        Tracer::Datadog { address } if !address.is_empty() => (
            "datadog",
            "DatadogConfig",
            json!({"collector_cluster": "datadog_agent", "service_name": options.node.cluster}),
        ),
        _ => return None,
    };
    let config = typed(&format!("envoy.tracers.{name}"), &format!("envoy.config.trace.v3.{kind}"), config);
    Some(json!({"http": config}))
}
