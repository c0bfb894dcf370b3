//! The messages that a Wasm filter is made of, by Envoy's API v3.

/// A message's fields.
pub(super) struct Message(pub(super) &'static [Field]);

/// One field.
#[derive(Clone, Copy)]
pub(super) struct Field {
    /// As in the proto file; JSON may write it in camel case.
    pub(super) name: &'static str,
    pub(super) number: u32,
    pub(super) kind: Kind,
    /// Not 0: one of several of which only one may be given, and present even when it is zero.
    pub(super) oneof: u8,
}

/// What a field holds.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    Text,
    Bytes,
    Bool,
    Uint32,
    Int64,
    /// Names by number, from 0.
    Enum(&'static [&'static str]),
    Duration,
    /// A wrapper message: absent is not zero.
    Wrapped(&'static Kind),
    Message(&'static Message),
    /// Any JSON object.
    Struct,
    Any,
    List(&'static Kind),
    /// Keys are texts.
    Map(&'static Kind),
}

impl Kind {
    pub(super) fn wanted(self) -> &'static str {
        match self {
            Self::Text | Self::Bytes | Self::Duration => "a string",
            Self::Bool => "true or false",
            Self::Uint32 | Self::Int64 => "an integer",
            Self::Enum(_) => "one of its enum's values",
            Self::Wrapped(inner) => inner.wanted(),
            Self::Message(_) | Self::Struct | Self::Any | Self::Map(_) => "an object",
            Self::List(_) => "a list",
        }
    }
}

impl Message {
    /// The field of this name, in either spelling.
    pub(super) fn field(&self, name: &str) -> Option<&'static Field> {
        self.0.iter().find(|field| field.name == name || camel(field.name) == name)
    }
}

impl Field {
    /// Whether both may not be given at once.
    pub(super) fn excludes(&self, other: &Self) -> bool {
        self.number == other.number || (self.oneof != 0 && self.oneof == other.oneof)
    }
}

fn camel(name: &str) -> String {
    let mut out = String::with_capacity(name.len());
    let mut up = false;
    for c in name.chars() {
        if c == '_' {
            up = true;
        } else {
            out.push(if up { c.to_ascii_uppercase() } else { c });
            up = false;
        }
    }
    out
}

const fn field(name: &'static str, number: u32, kind: Kind) -> Field {
    Field { name, number, kind, oneof: 0 }
}

const fn either(name: &'static str, number: u32, kind: Kind) -> Field {
    Field { name, number, kind, oneof: 1 }
}

/// `envoy.extensions.filters.{http,network}.wasm.v3.Wasm`: both have this one field.
pub(super) static WASM: Message = Message(&[field("config", 1, Kind::Message(&PLUGIN))]);

static PLUGIN: Message = Message(&[
    field("name", 1, Kind::Text),
    field("root_id", 2, Kind::Text),
    field("vm_config", 3, Kind::Message(&MACHINE)),
    field("configuration", 4, Kind::Any),
    field("fail_open", 5, Kind::Bool),
    field("capability_restriction_config", 6, Kind::Message(&RESTRICTION)),
    field("failure_policy", 7, Kind::Enum(&["UNSPECIFIED", "FAIL_RELOAD", "FAIL_CLOSED", "FAIL_OPEN"])),
    field("reload_config", 8, Kind::Message(&RELOAD)),
    field("allow_on_headers_stop_iteration", 9, Kind::Wrapped(&Kind::Bool)),
]);

static MACHINE: Message = Message(&[
    field("vm_id", 1, Kind::Text),
    field("runtime", 2, Kind::Text),
    field("code", 3, Kind::Message(&CODE)),
    field("configuration", 4, Kind::Any),
    field("allow_precompiled", 5, Kind::Bool),
    field("nack_on_code_cache_miss", 6, Kind::Bool),
    field("environment_variables", 7, Kind::Message(&VARIABLES)),
    field("capability_restriction_config", 8, Kind::Message(&RESTRICTION)),
]);

static VARIABLES: Message = Message(&[
    field("host_env_keys", 1, Kind::List(&Kind::Text)),
    field("key_values", 2, Kind::Map(&Kind::Text)),
]);

static CODE: Message =
    Message(&[either("local", 1, Kind::Message(&LOCAL)), either("remote", 2, Kind::Message(&REMOTE))]);

static LOCAL: Message = Message(&[
    either("filename", 1, Kind::Text),
    either("inline_bytes", 2, Kind::Bytes),
    either("inline_string", 3, Kind::Text),
    either("environment_variable", 4, Kind::Text),
    field("watched_directory", 5, Kind::Message(&Message(&[field("path", 1, Kind::Text)]))),
]);

static REMOTE: Message = Message(&[
    field("http_uri", 1, Kind::Message(&URI)),
    field("sha256", 2, Kind::Text),
    field("retry_policy", 3, Kind::Message(&RETRY)),
]);

static URI: Message = Message(&[
    field("uri", 1, Kind::Text),
    either("cluster", 2, Kind::Text),
    field("timeout", 3, Kind::Duration),
]);

static RETRY: Message = Message(&[
    field("retry_back_off", 1, Kind::Message(&BACK_OFF)),
    field("num_retries", 2, Kind::Wrapped(&Kind::Uint32)),
    field("retry_on", 3, Kind::Text),
    field("retry_priority", 4, Kind::Message(&NAMED)),
    field("retry_host_predicate", 5, Kind::List(&Kind::Message(&NAMED))),
    field("host_selection_retry_max_attempts", 6, Kind::Int64),
]);

static NAMED: Message = Message(&[field("name", 1, Kind::Text), field("typed_config", 2, Kind::Any)]);

static BACK_OFF: Message =
    Message(&[field("base_interval", 1, Kind::Duration), field("max_interval", 2, Kind::Duration)]);

static RELOAD: Message = Message(&[field("backoff", 1, Kind::Message(&BACK_OFF))]);

static RESTRICTION: Message =
    Message(&[field("allowed_capabilities", 1, Kind::Map(&Kind::Message(&Message(&[]))))]);

static TYPED_STRUCT: Message = Message(&[field("type_url", 1, Kind::Text), field("value", 2, Kind::Struct)]);

/// Types that an `Any` may hold and that have no JSON form of their own.
pub(super) fn by_name(name: &str) -> Option<&'static Message> {
    match name {
        "udpa.type.v1.TypedStruct" | "xds.type.v3.TypedStruct" => Some(&TYPED_STRUCT),
        "envoy.extensions.filters.http.wasm.v3.Wasm" | "envoy.extensions.filters.network.wasm.v3.Wasm" => {
            Some(&WASM)
        }
        _ => None,
    }
}

/// Types that an `Any` may hold and whose JSON form is not an object of their fields.
pub(super) fn own_form(name: &str) -> Option<Kind> {
    Some(match name.strip_prefix("google.protobuf.")? {
        "StringValue" => Kind::Wrapped(&Kind::Text),
        "BytesValue" => Kind::Wrapped(&Kind::Bytes),
        "BoolValue" => Kind::Wrapped(&Kind::Bool),
        "UInt32Value" => Kind::Wrapped(&Kind::Uint32),
        "Int64Value" => Kind::Wrapped(&Kind::Int64),
        "Duration" => Kind::Duration,
        "Struct" => Kind::Struct,
        "Empty" => Kind::Message(&Message(&[])),
        _ => return None,
    })
}
