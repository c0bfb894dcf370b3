//! Server reflection, v1 and v1alpha, so that generic clients find out what the socket serves.
//!
//! Services, and the protocol files behind them. Written here rather than with `tonic-reflection`, which
//! answers through a second server stack and decodes the files at start: this is a table of constants
//! (`files`) and a few small messages.

mod files;

use bytes::Bytes;
use h2::RecvStream;
use h2::server::SendResponse;
use prost::Message;
use tokio::time::Instant;
use tonic::Status;

use super::frames::{End, Gate, Out, Rules, Seen, Verdict, frame};
use super::protocol::SERVICE;
use super::reply::Reply;
use super::scan::{self, Facts};
use crate::base::tasks::Stop;
use crate::net::grpc;
use files::Sent;

const V1: &str = "grpc.reflection.v1.ServerReflection";
const V1_ALPHA: &str = "grpc.reflection.v1alpha.ServerReflection";
const METHOD: &str = "ServerReflectionInfo";
/// A question is a name.
const LIMIT: usize = 64 * 1024;

/// Whether a path is reflection's.
pub(super) fn is(path: &str) -> bool {
    let rest = path.strip_prefix('/').and_then(|p| p.strip_suffix(METHOD)).and_then(|p| p.strip_suffix('/'));
    rest.is_some_and(serves)
}

/// Whether a service is reflection's.
pub(super) fn serves(service: &str) -> bool {
    service == V1 || service == V1_ALPHA
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
    #[prost(message, optional, tag = "4")]
    files: Option<Files>,
    #[prost(message, optional, tag = "5")]
    extensions: Option<Extensions>,
    #[prost(message, optional, tag = "6")]
    services: Option<Services>,
    #[prost(message, optional, tag = "7")]
    error: Option<Failure>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Files {
    #[prost(bytes = "bytes", repeated, tag = "1")]
    descriptors: Vec<Bytes>,
}

// No served message has extensions.
#[derive(Clone, PartialEq, prost::Message)]
struct Extensions {
    #[prost(string, tag = "1")]
    of: String,
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

// `None` for a question that asks nothing, which ends the stream.
fn answer(question: Question, sent: &mut Sent) -> Option<Answer> {
    let mut answer = Answer { host: question.host.clone(), ..Answer::default() };
    let found = match question.asked.as_ref()? {
        Asked::Services(_) => {
            let services = [SERVICE, V1, V1_ALPHA].map(|n| Service { name: n.to_owned() }).to_vec();
            answer.services = Some(Services { services });
            true
        }
        Asked::Extensions(of) => {
            answer.extensions = files::known(of).then(|| Extensions { of: of.clone() });
            answer.extensions.is_some()
        }
        Asked::File(name) => answer.give(sent.named(name)),
        Asked::Symbol(name) => answer.give(sent.defining(name)),
        Asked::Extension(()) => false,
    };
    if !found {
        // The Go library's words.
        let message = "proto: not found".to_owned();
        answer.error = Some(Failure { code: tonic::Code::NotFound as i32, message });
    }
    answer.question = Some(question);
    Some(answer)
}

impl Answer {
    fn give(&mut self, files: Option<Vec<&'static [u8]>>) -> bool {
        let descriptors = |files: Vec<&'static [u8]>| files.into_iter().map(Bytes::from_static).collect();
        self.files = files.map(|files| Files { descriptors: descriptors(files) });
        self.files.is_some()
    }
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

/// Answers questions until the client has no more, or its time is over.
pub(super) async fn serve(
    mut body: RecvStream,
    respond: SendResponse<Bytes>,
    until: Option<Instant>,
    stop: Stop,
) {
    let mut reply = Reply::new(respond);
    let talk = talk(&mut body, &mut reply);
    let status = tokio::select! {
        status = talk => status,
        () = grpc::over(until) => grpc::exceeded(),
        () = stop.cancelled() => Status::unavailable("the agent is stopping"),
    };
    reply.finish(&status);
}

async fn talk(body: &mut RecvStream, reply: &mut Reply) -> Status {
    let mut gate = Gate::new(Questions);
    let mut out = Vec::new();
    let mut sent = Sent::default();
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
            let Some(answer) = answer(question, &mut sent) else {
                return Status::invalid_argument("invalid MessageRequest: <nil>");
            };
            let answer = frame(&answer);
            let stream = match reply.open() {
                Ok(()) => AsMut::as_mut(reply),
                Err(_) => return Status::cancelled("context canceled"),
            };
            let stream: &mut h2::SendStream<Bytes> = stream;
            if write(stream, answer).await.is_err() {
                return Status::cancelled("context canceled");
            }
        }
    }
    Status::ok("")
}

// In pieces, as the client's window allows; a client that asks without reading waits for itself.
async fn write(stream: &mut h2::SendStream<Bytes>, mut bytes: Bytes) -> Result<(), h2::Error> {
    while !bytes.is_empty() {
        stream.reserve_capacity(bytes.len());
        let room = match stream.capacity() {
            0 => std::future::poll_fn(|cx| stream.poll_capacity(cx)).await,
            room => Some(Ok(room)),
        };
        let room = room.unwrap_or_else(|| Err(h2::Reason::CANCEL.into()))?;
        if room > 0 {
            stream.send_data(bytes.split_to(room.min(bytes.len())), false)?;
        }
    }
    Ok(())
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
    fn services_are_listed_files_given_and_what_is_not_there_said() {
        let mut sent = Sent::default();
        let mut ask =
            |asked| answer(Question { host: "h".to_owned(), asked: Some(asked) }, &mut sent).unwrap();
        let services = ask(Asked::Services(String::new())).services.unwrap().services;
        assert_eq!(services.len(), 3);
        for service in services {
            assert!(ask(Asked::Symbol(service.name)).files.is_some());
        }
        assert!(ask(Asked::File("google/rpc/status.proto".to_owned())).files.is_some());
        assert!(ask(Asked::Extensions("google.rpc.Status".to_owned())).extensions.is_some());
        let missing = [Asked::Symbol("x".to_owned()), Asked::File("x".to_owned()), Asked::Extension(())];
        for asked in missing.into_iter().chain([Asked::Extensions("x".to_owned())]) {
            assert_eq!(ask(asked).error.unwrap().code, 5);
        }
        assert!(answer(Question::default(), &mut sent).is_none(), "a question that asks nothing");
    }
}
