//! Server reflection, v1 and v1alpha, so that generic clients find out what the socket serves.
//!
//! Lists the services; descriptors are not served, since the files behind discovery are half of Envoy's
//! API and would be larger than the rest of the agent's data. Written here rather than with
//! `tonic-reflection`, which wants those descriptors and a second server stack.

use bytes::Bytes;
use h2::RecvStream;
use h2::server::SendResponse;
use prost::Message;
use tonic::Status;

use super::frames::{End, Gate, Out, Rules, Seen, Verdict, frame};
use super::protocol::SERVICE;
use super::reply::Reply;
use super::scan::{self, Facts};
use crate::base::tasks::Stop;

const V1: &str = "grpc.reflection.v1.ServerReflection";
const V1_ALPHA: &str = "grpc.reflection.v1alpha.ServerReflection";
const METHOD: &str = "ServerReflectionInfo";
/// A question is a name.
const LIMIT: usize = 64 * 1024;

/// Whether a path is reflection's.
pub(super) fn is(path: &str) -> bool {
    let rest = path.strip_prefix('/').and_then(|p| p.strip_suffix(METHOD)).and_then(|p| p.strip_suffix('/'));
    rest.is_some_and(|service| service == V1 || service == V1_ALPHA)
}

#[derive(Clone, PartialEq, prost::Message)]
struct Question {
    #[prost(string, tag = "1")]
    host: String,
    #[prost(oneof = "Asked", tags = "3, 4, 5, 6, 7")]
    asked: Option<Asked>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum Asked {
    #[prost(string, tag = "3")]
    File(String),
    #[prost(string, tag = "4")]
    Symbol(String),
    #[prost(message, tag = "5")]
    Extension(()),
    #[prost(string, tag = "6")]
    Extensions(String),
    #[prost(string, tag = "7")]
    Services(String),
}

#[derive(Clone, PartialEq, prost::Message)]
struct Answer {
    #[prost(string, tag = "1")]
    host: String,
    #[prost(message, optional, tag = "2")]
    question: Option<Question>,
    #[prost(message, optional, tag = "6")]
    services: Option<Services>,
    #[prost(message, optional, tag = "7")]
    error: Option<Failure>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Services {
    #[prost(message, repeated, tag = "1")]
    services: Vec<Service>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Service {
    #[prost(string, tag = "1")]
    name: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Failure {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
}

fn answer(question: Question) -> Answer {
    let mut answer = Answer { host: question.host.clone(), ..Answer::default() };
    match &question.asked {
        Some(Asked::Services(_)) => {
            let services = [SERVICE, V1, V1_ALPHA].map(|n| Service { name: n.to_owned() }).to_vec();
            answer.services = Some(Services { services });
        }
        _ => {
            let message = "descriptors are not served here; envoy/service/discovery/v3/ads.proto has them";
            answer.error = Some(Failure { code: tonic::Code::NotFound as i32, message: message.to_owned() });
        }
    }
    answer.question = Some(question);
    answer
}

// Gathers each question whole.
struct Questions;

impl Rules for Questions {
    fn message(&self) -> scan::Message {
        scan::Message::Other
    }
    fn limit(&self) -> u64 {
        LIMIT as u64
    }
    fn lookahead(&self) -> usize {
        LIMIT
    }
    fn cap(&self) -> usize {
        LIMIT
    }
    fn collect_limit(&self) -> usize {
        LIMIT
    }
    fn joins(&self) -> bool {
        false
    }
    fn judge(&self, _: &Facts, _: Seen) -> Verdict {
        Verdict::Collect
    }
    fn ended(&mut self, _: &End) {}
}

/// Answers questions until the client has no more.
pub(super) async fn serve(mut body: RecvStream, respond: SendResponse<Bytes>, stop: Stop) {
    let mut reply = Reply::new(respond);
    let talk = talk(&mut body, &mut reply);
    let status = tokio::select! {
        status = talk => status,
        () = stop.cancelled() => Status::unavailable("the agent is stopping"),
    };
    reply.finish(&status);
}

async fn talk(body: &mut RecvStream, reply: &mut Reply) -> Status {
    let mut gate = Gate::new(Questions);
    let mut out = Vec::new();
    while let Some(data) = body.data().await {
        let Ok(data) = data else { return Status::cancelled("context canceled") };
        if let Err(error) = gate.push(&data, &mut out) {
            return Status::internal(error.to_string());
        }
        let _ = body.flow_control().release_capacity(data.len());
        for item in out.drain(..) {
            let Out::End(End { body: Some(question), .. }) = item else { continue };
            let question = match Question::decode(question) {
                Ok(question) => question,
                Err(error) => return Status::internal(error.to_string()),
            };
            let answer = frame(&answer(question));
            // Answers are smaller than a kilobyte, and a client that asks without reading is cut off by
            // the library's own bound on queued bytes.
            let stream = match reply.open() {
                Ok(()) => AsMut::as_mut(reply),
                Err(_) => return Status::cancelled("context canceled"),
            };
            let stream: &mut h2::SendStream<Bytes> = stream;
            stream.reserve_capacity(answer.len());
            while stream.capacity() < answer.len() {
                let more = std::future::poll_fn(|cx| stream.poll_capacity(cx)).await;
                if !matches!(more, Some(Ok(_))) {
                    return Status::cancelled("context canceled");
                }
            }
            if stream.send_data(answer, false).is_err() {
                return Status::cancelled("context canceled");
            }
        }
    }
    Status::ok("")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_are_found_and_nothing_else() {
        assert!(is("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"));
        assert!(is("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"));
        assert!(!is("/grpc.reflection.v1.ServerReflection/Other"));
        assert!(!is("/grpc.reflection.v2.ServerReflection/ServerReflectionInfo"));
    }

    #[test]
    fn services_are_listed_and_files_are_not_found() {
        let ask = |asked| answer(Question { host: "h".to_owned(), asked: Some(asked) });
        let listed = ask(Asked::Services(String::new()));
        assert_eq!(listed.services.unwrap().services.len(), 3);
        assert_eq!(ask(Asked::Symbol("x".to_owned())).error.unwrap().code, 5);
    }
}
