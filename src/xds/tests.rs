//! The relay on a real socket, with both of its sides played by the test.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::{Buf, Bytes, BytesMut};
use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse, Resource,
};
use envoy_types::pb::google::protobuf::{Any, Struct, Value, value};
use envoy_types::pb::google::rpc;
use futures_util::future::BoxFuture;
use h2::server::SendResponse;
use h2::{RecvStream, SendStream};
use http::{Request, Response};
use prost::Message;
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::mpsc;
use tonic::Code;

use super::*;
use crate::base::clock;
use crate::base::tasks::{Group, Stop};
use crate::istiod::auth::{self, Token};
use crate::istiod::{Connection, Error, Stream};

mod beside;
mod ends;
mod epochs;
mod herd;
mod holding;
mod model;
mod passing;
mod rig;
mod standing_in;

use rig::*;
