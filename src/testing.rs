//! All that `tests/it`, `benches` and `fuzz` reach of this crate, under the paths it has inside. In debug builds only
//! (the fuzzers' have debug assertions, too), so what just they use is dead code in a release build, and the compiler
//! says so: `make lint` checks it without this face.

pub mod base {
    pub mod clock {
        pub use crate::base::clock::System;
    }
    pub mod metrics {
        pub use crate::base::metrics::Metrics;
    }
    pub mod tasks {
        pub use crate::base::tasks::{Group, Stop};
    }
}

pub mod bootstrap {
    pub use crate::bootstrap::{Options, RemoteService, Tracer, generate};
    pub mod params {
        pub use crate::bootstrap::params::all;
    }
    pub mod template {
        pub use crate::bootstrap::template::render;
    }
}

pub mod ca {
    pub mod csr {
        pub use crate::ca::csr::general_names;
    }
}

pub mod config {
    pub mod envoy_options {
        pub use crate::config::envoy_options::{cluster_name, istiod_san, options, proxy_config_json};
    }
    pub mod mesh {
        pub use crate::config::mesh::Effective;
    }
    pub mod node {
        pub use crate::config::node::{ClusterName, Inputs, Platform, build};
    }
    pub mod pod {
        pub use crate::config::pod::parse;
    }
    pub mod release {
        pub use crate::config::release::Release;
    }
    pub mod validate {
        pub use crate::config::validate::{mesh, proxy};
    }
    pub mod yaml {
        pub use crate::config::yaml::to_json;
    }
}

pub mod dns {
    pub use crate::dns::fuzz;
    pub mod resolv {
        pub use crate::dns::resolv::parse;
    }
    pub mod wire {
        pub use crate::dns::wire::{
            Data, Rcode, Record, Screened, UDP_MIN, id, mended, mended_reply, screen, well_formed,
        };
    }
}

pub mod envoy {
    pub use crate::envoy::{
        Config, ConfigFile, Exit, Handle, NotReplaced, Outcome, Reason, RunState, Supervisor,
    };
    pub mod admin {
        pub use crate::envoy::admin::{Client, Config};
    }
    pub mod command {
        pub use crate::envoy::command::Options;
    }
    pub mod drain {
        pub use crate::envoy::drain::{Config, ExitOnZero};
    }
    pub mod kernel {
        pub use crate::base::process::parent_in as parent;
        pub use crate::envoy::kernel::{bound_inode, control_group, envoys_config, oom_kills};
    }
    pub mod launch {
        pub use crate::envoy::launch::ARGUMENT;
    }
    pub mod restart {
        pub use crate::envoy::restart::Config;
    }
}

pub mod gateway {
    pub use crate::gateway::fuzz;
}

pub mod health {
    pub use crate::health::{Config, Method};
}

pub mod iptables {
    pub mod change {
        pub use crate::iptables::change::{Guards, Jumps, removal, rollback};
    }
    pub mod model {
        pub use crate::iptables::model::{Family, Match, Proto, Rule, Table, Target};
    }
    pub mod nft {
        pub use crate::iptables::nft::transaction;
    }
    pub mod restore {
        pub use crate::iptables::restore::{document, of_family, words};
    }
    pub mod rules {
        pub use crate::iptables::rules::generate;
    }
    pub mod settings {
        pub use crate::iptables::settings::{Host, Settings, name_servers, resolve};
    }
    pub mod state {
        pub use crate::iptables::state::{SavedTables, split_words};
    }
    pub mod verify {
        pub use crate::iptables::verify::{Names, difference, wanted};
    }
}

pub mod istiod {
    pub use crate::istiod::{Connection, Error, Stream};
    pub mod auth {
        pub use crate::istiod::auth::{CallHeaders, Error, Token, TokenFile, TokenSource};
        pub mod claims {
            pub use crate::istiod::auth::claims::read;
        }
    }
}

pub mod net {
    pub use crate::net::fuzz;
    pub mod authority_rewriter {
        pub use crate::net::authority_rewriter::AuthorityRewriter;
    }
}

pub mod proto {
    pub mod istio {
        pub mod networking {
            pub mod v1alpha3 {
                pub use crate::proto::istio::networking::v1alpha3::ReadinessProbe;
            }
        }
    }
}

pub mod replay {
    pub use crate::replay::{Mode, StandIn};
    pub mod disk {
        pub use crate::replay::disk::{parse, read, write};
    }
}

pub mod sds {
    pub mod encode {
        pub use crate::sds::encode::SECRET_TYPE;
    }
    pub mod session {
        pub use crate::sds::session::{Action, Request, Session};
    }
}

pub mod secrets {
    pub use crate::secrets::{FirstKey, Identity, ResourceName, Secret};
    pub mod bundle {
        pub use crate::secrets::bundle::merge;
    }
    pub mod rotation {
        pub use crate::secrets::rotation::{delay, draw};

        /// How long an agent waits after so many failed renewals in a row, but one.
        #[must_use]
        pub fn retry_after(failures: u32) -> std::time::Duration {
            crate::secrets::rotation::retry().delay(failures)
        }
    }
}

pub mod serve {
    pub use crate::serve::fuzz;
}

pub mod status {
    pub mod probes {
        pub use crate::status::probes::parse;
    }
    pub mod stats {
        pub use crate::status::stats::{Lines, parse_annotations};
    }
}

pub mod sts {
    pub use crate::sts::fuzz;
}

pub mod tls {
    pub mod cert {
        pub use crate::tls::cert::{check_pair, parse_chain, parse_der, readable_certs};
    }
    pub mod client {
        pub use crate::tls::client::roots_of;
    }
    pub mod keys {
        pub use crate::tls::keys::{Algorithm, Curve, Key, KeyOptions, generate};
    }
}

pub mod wasm {
    pub use crate::wasm::fuzz;
    pub mod filter {
        pub use crate::wasm::filter::{Decision, judge};
    }
    pub mod tar {
        pub use crate::wasm::tar::{Error, Pick, Tar};
    }
}

pub mod xds {
    pub use crate::xds::{Config, Parts, Protocol, Server, TrustBundle, Upstream, types};
    pub mod frames {
        pub use crate::xds::frames::{Gate, Out, Verdict, frame, frame_bytes};
    }
    pub mod hold {
        pub use crate::xds::hold::Hold;
    }
    pub mod rules {
        pub use crate::xds::rules::{Requests, Responses};
    }
    pub mod scan {
        pub use crate::xds::scan::{Facts, Malformed, Message, Scanner, TEXT};
    }
}
