//! A stream served from the resources: istiod's checks on the first message, answers, pushes.

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::google::protobuf::value::Kind;

use super::request::{self, Incoming};
use super::{delta, sotw};
use crate::grpc::{Code, Status};
use crate::record::Event;
use crate::reply::{Gone, Reply, Requests};
use crate::resources::View;
use crate::shared::Shared;

/// What agents report their application's health with; never answered.
const HEALTH: &str = "type.googleapis.com/istio.v1.HealthInformation";

/// A stream served from the folder's resources.
pub(super) struct Session<'a> {
    pub(super) shared: &'a Shared,
    pub(super) stream: u64,
    /// Who it may speak for; `None` when nobody is asked.
    pub(super) identities: Option<Vec<String>>,
    pub(super) view: View,
    pub(super) node: Option<String>,
}

impl Session<'_> {
    pub(super) async fn run(
        &mut self,
        delta: bool,
        mut requests: Requests,
        reply: &mut Reply,
    ) -> Result<Option<Status>, Gone> {
        let mut changes = self.shared.resources.subscribe();
        let (mut sotw, mut incremental) = (sotw::State::default(), delta::State::default());
        loop {
            let answers = tokio::select! {
                // Requests first: a push to a client that has just told us something new would be outdated.
                biased;
                request = requests.next() => {
                    let Some(raw) = request? else { return Ok(Some(Status::ok())) };
                    let (summary, incoming) = match request::decode(self.stream, delta, &raw) {
                        Ok(decoded) => decoded,
                        Err(status) => return Ok(Some(status)),
                    };
                    let type_url = summary.type_url.clone();
                    self.shared.record.add(Event::AdsRequest(summary));
                    if type_url == HEALTH {
                        continue;
                    }
                    if self.node.is_none() {
                        if let Err(status) = self.introduce(incoming.node()) {
                            return Ok(Some(status));
                        }
                        self.view = changes.borrow_and_update().view(self.node.as_deref().unwrap_or_default());
                    }
                    match incoming {
                        Incoming::Sotw(request) => sotw.request(self.stream, &request, &self.view),
                        Incoming::Delta(request) => incremental.request(self.stream, &request, &self.view),
                    }
                }
                Ok(()) = changes.changed(), if self.node.is_some() => {
                    self.view = changes.borrow_and_update().view(self.node.as_deref().unwrap_or_default());
                    if delta { incremental.changed(self.stream, &self.view) } else { sotw.changed(self.stream, &self.view) }
                }
            };
            for answer in answers {
                self.shared.record.add(Event::AdsResponse(answer.summary));
                reply.message(&answer.message).await?;
            }
        }
    }

    /// The checks on the first message: who is it, and may the caller say so.
    fn introduce(&mut self, node: Option<&Node>) -> Result<(), Status> {
        let node = node.filter(|node| !node.id.is_empty());
        let node = node.ok_or_else(|| Status::new(Code::InvalidArgument, "missing node information"))?;
        let parts: Vec<&str> = node.id.split('~').collect();
        let [kind, _ip, id, domain] = parts[..] else {
            let text = format!("missing parts in the service node {:?}", node.id);
            return Err(Status::new(Code::InvalidArgument, text));
        };
        if !matches!(kind, "sidecar" | "router" | "waypoint" | "ztunnel") {
            let text = format!(
                "invalid node type (valid types: ztunnel, sidecar, router, waypoint) in {:?}",
                node.id
            );
            return Err(Status::new(Code::InvalidArgument, text));
        }
        if let Some(identities) = &self.identities {
            let text = |key: &str| {
                let fields = &node.metadata.as_ref()?.fields;
                match fields.get(key)?.kind.as_ref()? {
                    Kind::StringValue(text) => Some(text.as_str()),
                    _ => None,
                }
            };
            let namespace = text("NAMESPACE").or_else(|| domain.split('.').next()).unwrap_or_default();
            let account = text("SERVICE_ACCOUNT").filter(|account| !account.is_empty());
            let fits = |identity: &String| {
                let rest = identity.split_once("/ns/").map_or("", |(_, rest)| rest);
                let (ns, sa) = rest.split_once("/sa/").unwrap_or_default();
                ns == namespace && account.is_none_or(|account| account == sa)
            };
            if !identities.iter().any(fits) {
                let account = account.unwrap_or_default();
                let text = format!(
                    "authorization failed: no identities ({identities:?}) matched {namespace}/{account}"
                );
                return Err(Status::new(Code::PermissionDenied, text));
            }
        }
        self.node = Some(id.to_owned());
        Ok(())
    }
}
