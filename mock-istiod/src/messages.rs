//! What istiod's certificate service is asked and answers.

use prost::Message;

/// The method's path.
pub const PATH: &str = "/istio.v1.auth.IstioCertificateService/CreateCertificate";

/// `IstioCertificateRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct Request {
    /// The signing request, PEM.
    #[prost(string, tag = "1")]
    pub csr: String,
    /// Seconds asked for.
    #[prost(int64, tag = "3")]
    pub validity_duration: i64,
    /// `CertSigner` and the like.
    #[prost(message, optional, tag = "4")]
    pub metadata: Option<prost_types::Struct>,
}

/// `IstioCertificateResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct Response {
    /// Leaf, intermediates, and the root bundle last.
    #[prost(string, repeated, tag = "1")]
    pub cert_chain: Vec<String>,
}
