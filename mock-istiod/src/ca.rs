//! The certificate service: authenticates, signs, and answers with the chain in istiod's order.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::{HeaderMap, request};
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256};

use crate::auth::{Peer, authenticate};
use crate::fault::Fault;
use crate::google::Form;
use crate::grpc::{Code, Status};
pub use crate::messages::{PATH, Request, Response};
use crate::pki::{CLOCK_SKEW, Leaf, read_request};
use crate::record::{CaCall, Event};
use crate::reply::{Gone, Reply, Requests, Spoil};
use crate::shared::Shared;

/// `DEFAULT_WORKLOAD_CERT_TTL` of istiod.
const DEFAULT_TTL: Duration = Duration::from_secs(24 * 3600);
/// `MAX_WORKLOAD_CERT_TTL` of istiod.
const MAX_TTL: Duration = Duration::from_secs(90 * 24 * 3600);

pub(crate) async fn serve(
    shared: &Shared,
    form: Form,
    peer: &Peer,
    head: request::Parts,
    mut requests: Requests,
    mut reply: Reply,
    faults: Vec<Fault>,
) -> Result<(), Gone> {
    let message = requests.next().await?;
    let received = SystemTime::now();
    let mut call = CaCall {
        connection: peer.connection,
        authority: head.uri.authority().map(ToString::to_string).unwrap_or_default(),
        headers: crate::shared::pairs(&head.headers),
        identity: None,
        csr: String::new(),
        validity_seconds: 0,
        metadata: serde_json::Value::Null,
        status: Status::ok(),
        chain: Vec::new(),
        received,
        not_after: None,
    };
    let outcome = answer(shared, form, peer, &head.headers, message, &faults, &mut call);
    if let Err(status) = &outcome {
        call.status = status.clone();
    }
    shared.record.add(Event::CaCall(call));
    if faults.contains(&Fault::Drop) {
        // The connection ends and takes this call with it; an answer would race with that.
        std::future::pending::<()>().await;
    }
    if faults.contains(&Fault::HalfOpen) {
        reply.closed().await;
        return Ok(());
    }
    for fault in &faults {
        if let Fault::Delay(time) = fault {
            tokio::time::sleep(*time).await;
        }
    }
    match outcome {
        Ok(response) => {
            reply.spoil(Spoil::from(&faults));
            reply.message(&form.response(response)).await?;
            reply.end(&Status::ok())
        }
        Err(status) => reply.end(&status),
    }
}

fn answer(
    shared: &Shared,
    form: Form,
    peer: &Peer,
    headers: &HeaderMap,
    message: Option<Bytes>,
    faults: &[Fault],
    call: &mut CaCall,
) -> Result<Response, Status> {
    let message = message.ok_or_else(|| Status::new(Code::Internal, "the call has no message"))?;
    let request = form.request(message)?;
    call.csr.clone_from(&request.csr);
    call.validity_seconds = request.validity_duration;
    call.metadata = request.metadata.as_ref().map(object).unwrap_or_default();

    for fault in faults {
        if let Fault::Refuse(code, message) = fault {
            return Err(Status::new(*code, message.clone()));
        }
    }
    let identities = identities(shared, peer, headers)?;
    call.identity = identities.first().cloned();
    if form == Form::Roots {
        return Ok(Response { cert_chain: vec![shared.root_bundle()] });
    }

    let invalid = |e: crate::pki::BadRequest| Status::new(Code::InvalidArgument, e.to_string());
    let key = read_request(&request.csr).map_err(invalid)?;
    let ttl = granted(request.validity_duration)?;
    let mut leaf = Leaf::workload("", shared.ttl.get().unwrap_or(ttl));
    leaf.uris = identities;
    let mut spoilt_key = None;
    for fault in faults {
        match fault {
            Fault::ShortLife(ttl) => leaf.not_after = SystemTime::now() + *ttl,
            Fault::Expired(ago) => {
                leaf.not_after = SystemTime::now() - *ago;
                leaf.not_before = leaf.not_after - CLOCK_SKEW;
            }
            Fault::Future(until) => {
                let begins = SystemTime::now() + *until;
                leaf.not_after += begins.duration_since(leaf.not_before).unwrap_or_default();
                leaf.not_before = begins;
            }
            Fault::WrongSan(uri) => leaf.uris = vec![uri.clone()],
            Fault::WrongKey => spoilt_key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).ok(),
            _ => {}
        }
    }
    let authority = shared.authority();
    let certificate = match &spoilt_key {
        Some(other) => authority.sign(other, &leaf),
        None => authority.sign(&key, &leaf),
    };
    let mut chain = vec![certificate];
    chain.extend(authority.intermediates().map(ToOwned::to_owned));
    chain.push(shared.root_bundle());
    spoil_chain(&mut chain, faults);
    call.chain.clone_from(&chain);
    call.not_after = Some(leaf.not_after);
    Ok(Response { cert_chain: chain })
}

fn identities(shared: &Shared, peer: &Peer, headers: &HeaderMap) -> Result<Vec<String>, Status> {
    let refused = Status::new(Code::Unauthenticated, "request authenticate failure");
    match authenticate(peer, headers, &shared.trust_domain) {
        Ok(identities) if peer.tls || shared.plaintext_auth => Ok(identities),
        Ok(_) => Err(refused),
        Err(reason) => {
            tracing::info!(%reason, "certificate refused");
            Err(refused)
        }
    }
}

/// For how long a certificate is good of which so many seconds are wanted.
fn granted(wanted: i64) -> Result<Duration, Status> {
    let ttl = match u64::try_from(wanted) {
        Ok(0) | Err(_) => DEFAULT_TTL,
        Ok(seconds) => Duration::from_secs(seconds),
    };
    if ttl > MAX_TTL {
        let text = format!(
            "CSR signing error (requested TTL {}s is greater than the max allowed TTL {}s)",
            ttl.as_secs(),
            MAX_TTL.as_secs()
        );
        return Err(Status::new(Code::InvalidArgument, text));
    }
    Ok(ttl)
}

fn spoil_chain(chain: &mut Vec<String>, faults: &[Fault]) {
    for fault in faults {
        match fault {
            Fault::WrongOrder => chain.rotate_left(1),
            Fault::Garbage => *chain = vec!["-----BEGIN CERTIFICATE-----\n!!!\n".into(), "garbage".into()],
            Fault::EmptyChain => chain.clear(),
            Fault::OneCertificate => chain.truncate(1),
            Fault::Chain(other) => chain.clone_from(other),
            _ => {}
        }
    }
}

fn object(fields: &prost_types::Struct) -> serde_json::Value {
    fields.fields.iter().map(|(name, value)| (name.clone(), json(value))).collect()
}

fn json(value: &prost_types::Value) -> serde_json::Value {
    use prost_types::value::Kind;
    match &value.kind {
        None | Some(Kind::NullValue(_)) => serde_json::Value::Null,
        Some(Kind::NumberValue(number)) => (*number).into(),
        Some(Kind::StringValue(text)) => text.clone().into(),
        Some(Kind::BoolValue(yes)) => (*yes).into(),
        Some(Kind::StructValue(fields)) => object(fields),
        Some(Kind::ListValue(list)) => list.values.iter().map(json).collect(),
    }
}
