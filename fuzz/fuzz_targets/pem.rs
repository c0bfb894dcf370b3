//! Certificates and keys as files and CAs give them: any bytes, no panic; what is kept of a bundle is readable.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pilot_agent::testing::secrets::bundle;
use pilot_agent::testing::tls::cert;

fuzz_target!(|data: &[u8]| {
    let _ = cert::parse_der(data);
    let (chain, key) = data.split_at(data.len() / 2);
    let _ = cert::check_pair(chain, key);
    let kept = cert::readable_certs(data).pem;
    if !kept.is_empty() {
        assert!(cert::parse_chain(kept.as_bytes()).is_ok());
    }
    if let Ok(text) = std::str::from_utf8(data) {
        // Nothing is made up, and nothing stands twice.
        let merged = bundle::merge([text, text]);
        assert_eq!(merged, bundle::merge([text]));
        assert!(merged.matches("-----END CERTIFICATE-----").count() <= text.matches("-----END CERTIFICATE-----").count());
    }
});
