//! What a MeshConfig and a ProxyConfig may hold: tables made from `proto/mesh` by the build script.
//!
//! They serve a reader that follows the Go agent's JSON mapping, which is looser than protobuf's, and
//! that names every fault with its place.

/// A message type.
#[derive(Debug, PartialEq, Eq)]
pub struct Message {
    /// Full name.
    pub name: &'static str,
    /// In the order of definition.
    pub fields: &'static [Field],
}

/// A field of a message.
#[derive(Debug, PartialEq, Eq)]
pub struct Field {
    /// Name in JSON.
    pub json: &'static str,
    /// Name in the definition, accepted as well.
    pub name: &'static str,
    /// One, many, or by key.
    pub shape: Shape,
    /// What it (or each) is.
    pub kind: Kind,
    /// Which oneof it belongs to; -1 for none.
    pub oneof: i32,
}

/// How often a field holds its kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// Once.
    One,
    /// In a list.
    List,
    /// By text keys.
    Map,
}

/// The type of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Text.
    Text,
    /// Boolean.
    Bool,
    /// 32 bits, signed.
    Int32,
    /// 32 bits, unsigned.
    Uint32,
    /// 64 bits, signed; text in JSON.
    Int64,
    /// Floating point.
    Double,
    /// A span of time.
    Duration,
    /// Any JSON object.
    Struct,
    /// A scalar that knows whether it is set.
    Wrapped(&'static Kind),
    /// One of some names.
    Enum(&'static Enum),
    /// A message.
    Message(&'static Message),
}

/// An enum type.
#[derive(Debug, PartialEq, Eq)]
pub struct Enum {
    /// Full name.
    pub name: &'static str,
    /// Names and numbers.
    pub values: &'static [(&'static str, i32)],
}

include!(concat!(env!("OUT_DIR"), "/schema.rs"));
