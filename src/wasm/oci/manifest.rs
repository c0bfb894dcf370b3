//! Manifests, and which layer holds the module. Pure.
//!
//! Why not `oci-spec`: its types refuse what registries really send (Docker's media types, missing fields), and of
//! a manifest only digests, sizes and media types of layers are read. It would cost 94 KB of binary.

use serde::Deserialize;

use super::reference::is_digest;
use crate::base::quote::shown;
use crate::base::up_to::{UpTo, null_is_none};
use crate::wasm::receive::Form;

/// What is asked for: images and indexes, of Docker and of OCI.
pub(super) const ACCEPT: &str = "application/vnd.docker.distribution.manifest.v2+json,application/vnd.oci.image.manifest.v1+json,application/vnd.docker.distribution.manifest.list.v2+json,application/vnd.oci.image.index.v1+json";
/// Manifests are a few kilobytes; registries refuse above 4 MB.
pub(super) const LONGEST: usize = 4 << 20;
/// Layers of an image, or images of an index; builders stop at 127.
const ENTRIES: usize = 1024;

const DOCKER_IMAGE: &str = "application/vnd.docker.distribution.manifest.v2+json";
const INDEXES: [&str; 2] =
    ["application/vnd.docker.distribution.manifest.list.v2+json", "application/vnd.oci.image.index.v1+json"];
const SCHEMA_1: &str = "application/vnd.docker.distribution.manifest.v1+";
const DOCKER_LAYER: &str = "application/vnd.docker.image.rootfs.diff.tar.gzip";
const OCI_LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
const WASM_LAYER: &str = "application/vnd.module.wasm.content.layer.v1+wasm";
/// The file in an image's layer.
const FILE: &str = "plugin.wasm";

/// A manifest that names no module to pull.
#[derive(Debug, thiserror::Error)]
pub(in crate::wasm) enum BadManifest {
    #[error("the manifest cannot be read: {0}")]
    Unreadable(#[from] serde_json::Error),
    #[error("unsupported MediaType: the manifest is of schema 1; push the image anew")]
    Schema1,
    #[error("the manifest has a digest that is not sha256")]
    Digest,
    #[error("no child with platform linux/amd64 in the index")]
    NoChild,
    #[error("number of layers must be greater than zero")]
    NoLayers,
    #[error("invalid media type {found} (expect {wanted})")]
    MediaType { found: String, wanted: &'static str },
    #[error("number of layers must be 2 but got {0}")]
    Layers(usize),
    #[error("could not find the layer of type {WASM_LAYER}")]
    NoModule,
}

/// What a registry answers.
#[derive(Debug)]
pub(super) enum Manifest {
    /// One image.
    Image(Image),
    /// Images for several platforms: the digest, in hex, of the one to take.
    Index(String),
}

/// One image.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Image {
    docker: bool,
    layers: Vec<Layer>,
}

/// One of its layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Layer {
    media_type: String,
    /// In hex.
    pub(super) digest: String,
}

/// A layer and its form, or why this way leads nowhere.
type Way<'a> = Result<(&'a Layer, Form), BadManifest>;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    #[serde(default)]
    media_type: String,
    #[serde(default)]
    schema_version: i64,
    #[serde(default, deserialize_with = "null_is_none")]
    layers: UpTo<Descriptor, ENTRIES>,
    #[serde(default, deserialize_with = "null_is_none")]
    manifests: UpTo<Descriptor, ENTRIES>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    #[serde(default)]
    media_type: String,
    digest: String,
    platform: Option<Platform>,
}

#[derive(Deserialize)]
struct Platform {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
}

/// Whether what comes with this `Content-Type` is meant to be an image, and no index or older form.
pub(super) fn names_image(content_type: &str) -> bool {
    let content_type = content_type.split(';').next().unwrap_or_default().trim();
    !INDEXES.contains(&content_type) && !content_type.starts_with(SCHEMA_1)
}

impl Manifest {
    /// Reads what came with this `Content-Type`.
    pub(super) fn parse(body: &[u8], content_type: &str) -> Result<Self, BadManifest> {
        let content_type = content_type.split(';').next().unwrap_or_default().trim();
        let document: Document = serde_json::from_slice(body)?;
        let kinds = [content_type, document.media_type.as_str()];
        // Its number alone says nothing where there are layers.
        let old = document.schema_version == 1 && document.layers.0.is_empty();
        if old || kinds.iter().any(|kind| kind.starts_with(SCHEMA_1)) {
            return Err(BadManifest::Schema1);
        }
        let hex = |digest: &str| {
            let hex = digest.strip_prefix("sha256:").filter(|hex| is_digest(hex));
            hex.map(ToOwned::to_owned).ok_or(BadManifest::Digest)
        };
        if kinds.iter().any(|kind| INDEXES.contains(kind)) {
            // Modules are the same on all platforms, and the digest by which one is known must not depend
            // on the node.
            let fits = |d: &&Descriptor| {
                d.platform.as_ref().is_none_or(|p| p.os == "linux" && p.architecture == "amd64")
            };
            let child = document.manifests.0.iter().find(fits);
            return match child {
                Some(child) => hex(&child.digest).map(Self::Index),
                None => Err(BadManifest::NoChild),
            };
        }
        let layers = document.layers.0.into_iter().map(|layer| {
            Ok(Layer { digest: hex(&layer.digest)?, media_type: shown(&layer.media_type).into_owned() })
        });
        let layers = layers.collect::<Result<Vec<_>, BadManifest>>()?;
        Ok(Self::Image(Image { docker: document.media_type == DOCKER_IMAGE, layers }))
    }
}

impl Image {
    /// The ways to try, each a layer and its form, or why that way is none.
    pub(super) fn ways(&self) -> Result<Vec<Way<'_>>, BadManifest> {
        let last = self.layers.last().ok_or(BadManifest::NoLayers)?;
        let archive = |wanted: &'static str| {
            if last.media_type == wanted {
                Ok((last, Form::Layer(FILE)))
            } else {
                Err(BadManifest::MediaType { found: last.media_type.clone(), wanted })
            }
        };
        if self.docker {
            return Ok(vec![archive(DOCKER_LAYER)]);
        }
        let module = self.layers.iter().find(|layer| layer.media_type == WASM_LAYER);
        let artifact = match module {
            _ if self.layers.len() != 2 => Err(BadManifest::Layers(self.layers.len())),
            None => Err(BadManifest::NoModule),
            Some(layer) => Ok((layer, Form::Plain)),
        };
        Ok(vec![archive(OCI_LAYER), artifact])
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn digest(n: u8) -> String {
        format!("sha256:{}", format!("{n:02x}").repeat(32))
    }

    fn image(kind: &str, layers: &[(&str, u8)]) -> Image {
        let layers: Vec<_> = layers
            .iter()
            .map(|(kind, n)| json!({"mediaType": kind, "digest": digest(*n), "size": 1}))
            .collect();
        let text = json!({"schemaVersion": 2, "mediaType": kind, "layers": layers}).to_string();
        match Manifest::parse(text.as_bytes(), kind).unwrap() {
            Manifest::Image(image) => image,
            Manifest::Index(_) => panic!("an image"),
        }
    }

    #[test]
    fn the_layer_depends_on_the_kind_of_image() {
        let good = |image: &Image| -> Vec<(String, Form)> {
            let ways = image.ways().unwrap().into_iter().flatten();
            ways.map(|(layer, form)| (layer.digest[..2].to_owned(), form)).collect()
        };
        let oci = "application/vnd.oci.image.manifest.v1+json";
        let file = Form::Layer("plugin.wasm");
        assert_eq!(good(&image(DOCKER_IMAGE, &[("x", 1), (DOCKER_LAYER, 2)])), [("02".into(), file)]);
        assert_eq!(good(&image(DOCKER_IMAGE, &[(OCI_LAYER, 1)])), []);
        assert_eq!(
            good(&image(oci, &[(OCI_LAYER, 1), (OCI_LAYER, 2), (OCI_LAYER, 3)])),
            [("03".into(), file)]
        );
        assert_eq!(good(&image(oci, &[(WASM_LAYER, 1), ("c", 2)])), [("01".into(), Form::Plain)]);
        assert_eq!(good(&image("", &[("c", 1), (WASM_LAYER, 2)])), [("02".into(), Form::Plain)]);
        assert_eq!(good(&image(oci, &[(WASM_LAYER, 1)])), []);
        assert!(matches!(image(oci, &[]).ways(), Err(BadManifest::NoLayers)));
        let null = Manifest::parse(br#"{"schemaVersion": 2, "layers": null}"#, oci).unwrap();
        assert!(matches!(null, Manifest::Image(image) if matches!(image.ways(), Err(BadManifest::NoLayers))));
    }

    #[test]
    fn an_index_leads_to_the_first_for_amd64_whatever_the_node_is() {
        let parse = |children: serde_json::Value| {
            let text = json!({"mediaType": INDEXES[1], "manifests": children}).to_string();
            match Manifest::parse(text.as_bytes(), "") {
                Ok(Manifest::Index(hex)) => Ok(hex[..2].to_owned()),
                Ok(Manifest::Image(_)) => panic!("an index"),
                Err(why) => Err(why.to_string()),
            }
        };
        let child = |n, os, arch| json!({"digest": digest(n), "platform": {"os": os, "architecture": arch}});
        let arm = child(1, "linux", "arm64");
        assert_eq!(
            parse(json!([arm, child(2, "linux", "amd64"), child(3, "linux", "amd64")])).unwrap(),
            "02"
        );
        assert_eq!(parse(json!([arm, {"digest": digest(4)}])).unwrap(), "04");
        assert!(parse(json!([arm])).unwrap_err().contains("linux/amd64"));
    }

    #[test]
    fn what_cannot_be_pulled_is_refused() {
        let kind = "application/vnd.docker.distribution.manifest.v1+prettyjws";
        assert!(matches!(Manifest::parse(b"{}", kind), Err(BadManifest::Schema1)));
        assert!(matches!(Manifest::parse(b"{\"schemaVersion\":1}", ""), Err(BadManifest::Schema1)));
        let layered = json!({"schemaVersion": 1, "layers": [{"digest": digest(1)}]}).to_string();
        assert!(matches!(Manifest::parse(layered.as_bytes(), ""), Ok(Manifest::Image(_))));
        assert!(Manifest::parse(b"{", "").is_err());
        let many = |n: usize| json!({"layers": vec![json!({"digest": digest(1)}); n]}).to_string();
        assert!(Manifest::parse(many(ENTRIES).as_bytes(), "").is_ok());
        assert!(
            Manifest::parse(many(ENTRIES + 1).as_bytes(), "").is_err(),
            "each is held while one is fetched"
        );
        let long = image("", &[(&"k".repeat(100_000), 1)]);
        assert!(long.layers[0].media_type.len() < 1000, "{long:?}");
        let text = json!({"layers": [{"digest": "sha256:../../etc"}]}).to_string();
        assert!(Manifest::parse(text.as_bytes(), "").is_err(), "digests become paths");
    }
}
