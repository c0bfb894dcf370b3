//! What the status server may ask of the agent, and the status document.

use std::time::SystemTime;

use futures_util::future::BoxFuture;
use serde_json::{Value, json};

use crate::base::build_info;
use crate::base::error::BoxError;
use crate::trouble::{Kind, Report, Troubles};
use crate::{dns, envoy, gateway, health, secrets, status, sts, xds};

use super::callers::Told;
use super::stages::Stages;

/// The agent as the status server sees it.
pub(super) struct Face {
    pub node_type: String,
    pub envoy: envoy::Handle,
    pub secrets: secrets::Handle,
    pub xds: xds::Handle,
    pub names: Option<dns::Current>,
    pub health: Option<health::Handle>,
    pub sts: Option<sts::Handle>,
    pub gateway: Option<gateway::Secrets>,
    pub callers: Option<Told>,
    pub tasks: Stages,
    pub troubles: Troubles,
    pub since: SystemTime,
}

impl status::Agent for Face {
    fn quit(&self) {
        self.tasks.close();
        self.envoy.quit();
    }

    fn drain(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.envoy.drain_now())
    }

    fn terminating(&self) -> Option<String> {
        match self.envoy.state() {
            envoy::RunState::Stopping(reason) => Some(reason),
            envoy::RunState::Ended => Some("Envoy has ended".to_owned()),
            _ if self.tasks.closing().is_cancelled() => Some("the agent is stopping".to_owned()),
            _ => None,
        }
    }

    fn envoy_running(&self) -> bool {
        self.envoy.running()
    }

    fn envoy_generation(&self) -> u64 {
        self.envoy.generation()
    }

    fn troubles(&self) -> Troubles {
        self.troubles.clone()
    }

    fn hot_restart(&self) -> Result<(), BoxError> {
        Ok(self.envoy.hot_restart()?)
    }

    fn not_ready(&self) -> Vec<Report> {
        let waiting = self.names.as_ref().is_some_and(|names| names.borrow().is_none());
        let said = "istio DNS capture is turned ON and DNS lookup table is not ready yet";
        let names = waiting.then(|| Report::new(Kind::NameTableMissing, said));
        let unfit = self.secrets.status().unfit.map(|why| Report::new(Kind::IdentityNearExpiry, why));
        names.into_iter().chain(unfit).collect()
    }

    fn tasks(&self) -> Vec<String> {
        self.tasks.running()
    }

    fn name_table(&self) -> Option<status::Making> {
        let table = self.names.as_ref()?.borrow().clone()?;
        Some(Box::new(|| Ok(Box::new(dns::Page::of(table)?))))
    }

    fn degraded(&self) -> Vec<Report> {
        let identity = self.secrets.status();
        let mut out = Vec::new();
        // One that nobody uses is not renewed, and not missed.
        let why = Some(identity.last_error.as_str()).filter(|why| !why.is_empty());
        match &identity.certificate {
            _ if !identity.asked => {}
            Some(certificate) if certificate.not_after > SystemTime::now() => {}
            Some(_) => {
                let why = why.unwrap_or("its renewal is under way");
                let detail = format!("the workload certificate has expired; {why}");
                out.push(Report::new(Kind::CertificateExpired, detail));
            }
            None => {
                let why = why.unwrap_or("the CA has not answered yet");
                let detail = format!("the workload certificate was asked for and not issued; {why}");
                out.push(Report::new(Kind::CertificateMissing, detail));
            }
        }
        let upstream = self.xds.snapshot().upstream;
        if upstream.down_since.is_some() {
            let why = upstream.last_error.unwrap_or_else(|| "the stream has ended".to_owned());
            let detail = format!("no connection to {}: {why}", upstream.address);
            out.push(Report::new(Kind::NoConfig, detail));
        }
        if let Some(why) = self.sts.as_ref().and_then(sts::Handle::trouble) {
            let kind = Kind::of_start(&why).unwrap_or(Kind::TokensNotExchanged);
            out.push(Report::new(kind, format!("no tokens can be exchanged: {why}")));
        }
        out.extend(self.gateway.iter().flat_map(gateway::Secrets::troubles));
        out
    }

    fn agentz(&self) -> Value {
        let identity = self.secrets.status();
        let unix = |t: SystemTime| t.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let certificate = identity.certificate.as_ref().map(|c| {
            json!({
                "serial": c.serial,
                "identities": c.identities,
                "notBefore": unix(c.not_before),
                "notAfter": unix(c.not_after),
                "renewal": unix(c.renewal),
            })
        });
        json!({
            // The status server fills these in: readiness belongs to them.
            "verdict": null,
            "troubles": [],
            "events": self.troubles.events(),
            "version": build_info::VERSION,
            "follows": build_info::ISTIO_VERSION,
            "type": self.node_type,
            "startedAt": unix(self.since),
            "envoy": format!("{:?}", self.envoy.state()),
            "identity": {
                "certificate": certificate,
                "failures": identity.failures,
                "lastError": identity.last_error,
                "trustBundle": identity.trust_bundle,
                "files": identity.files(),
                "outputError": identity.output_error,
            },
            "tokenService": self.sts.as_ref().map(sts::Handle::status),
            "gatewaySecrets": self.gateway.as_ref().map(gateway::Secrets::status),
            "callerTokens": self.callers.as_ref().map(Told::status),
            "application": self.health.as_ref().map(health::Handle::status),
            "config": serde_json::to_value(self.xds.snapshot()).unwrap_or(Value::Null),
        })
    }
}
