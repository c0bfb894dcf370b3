//! readinessProbe of a ProxyConfig: any of them is taken, with sane numbers, or refused in one line.
#![no_main]

use std::net::IpAddr;

use libfuzzer_sys::fuzz_target;
use pilot_agent::testing::health::{Config, Method};
use pilot_agent::testing::proto::istio::networking::v1alpha3::ReadinessProbe;
use prost::Message;

fuzz_target!(|bytes: &[u8]| {
    let Ok(probe) = ReadinessProbe::decode(bytes) else { return };
    match Config::new(&probe, "10.0.0.1", IpAddr::from([127, 0, 0, 6])) {
        Ok(config) => {
            assert!(!config.period.is_zero() && !config.timeout.is_zero());
            assert!(config.success_threshold > 0 && config.failure_threshold > 0);
            if let Method::Exec { command } = &config.method {
                assert!(!command[0].is_empty());
            }
        }
        Err(refused) => assert!(!refused.to_string().contains('\n')),
    }
});
