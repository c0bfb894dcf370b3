//! The one table of variables: name, type, default and meaning.

/// The type of a variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Any text; set-but-empty is empty, not the default.
    Text,
    /// A Go boolean.
    Bool,
    /// A decimal integer.
    Int,
    /// A decimal number.
    Float,
    /// A Go duration.
    Duration,
}

/// One variable.
#[derive(Debug, Clone, Copy)]
pub struct Var {
    /// Its name.
    pub name: &'static str,
    /// Its type.
    pub kind: Kind,
    /// Its default, as text.
    pub default: &'static str,
    /// Its meaning.
    pub help: &'static str,
    /// Which part it belongs to, as docs/CONFIG.md groups them.
    pub part: &'static str,
    /// The Go agent has no such variable.
    pub ours: bool,
}

const fn var(
    part: &'static str,
    name: &'static str,
    kind: Kind,
    default: &'static str,
    help: &'static str,
) -> Var {
    Var { name, kind, default, help, part, ours: false }
}

const fn ours(
    part: &'static str,
    name: &'static str,
    kind: Kind,
    default: &'static str,
    help: &'static str,
) -> Var {
    Var { name, kind, default, help, part, ours: true }
}

const WHO: &str = "Identity and place";
const ENVOY: &str = "Proxy config, bootstrap, Envoy";
const XDS: &str = "Config path";
const CERT: &str = "Certificates and CA";
const DNS: &str = "DNS proxy";
const STATUS: &str = "Status server";
const WASM: &str = "Wasm";

/// Every variable the agent reads under `proxy`.
pub const VARS: &[Var] = &[
    var(
        WHO,
        "INSTANCE_IP",
        Kind::Text,
        "",
        "address of the pod: first of the node's addresses, target of application probes",
    ),
    var(WHO, "POD_NAME", Kind::Text, "", "first part of the node id"),
    var(WHO, "POD_NAMESPACE", Kind::Text, "", "second part of the node id, namespace of the identity"),
    var(WHO, "SERVICE_ACCOUNT", Kind::Text, "", "service account of the identity"),
    var(
        WHO,
        "HOST_IP",
        Kind::Text,
        "",
        "replaces $(HOST_IP) in tracer addresses and in the bootstrap override",
    ),
    var(
        WHO,
        "ISTIO_CPU_LIMIT",
        Kind::Int,
        "0",
        "CPU limit in cores; Envoy's threads where concurrency is unset",
    ),
    var(WHO, "TRUST_DOMAIN", Kind::Text, "cluster.local", "SPIFFE trust domain of the identity"),
    var(WHO, "ISTIO_META_CLUSTER_ID", Kind::Text, "", "cluster id sent with every call to istiod"),
    var(WHO, "CLOUD_PLATFORM", Kind::Text, "", "aws, azure, gcp or none; anything else: found out"),
    var(WHO, "GCP_METADATA", Kind::Text, "", "PROJECT_ID|PROJECT_NUMBER|CLUSTER_NAME|CLUSTER_ZONE"),
    var(WHO, "GCP_QUOTA_PROJECT", Kind::Text, "", "quota project; only with GCP_METADATA"),
    var(WHO, "GCP_ZONE", Kind::Text, "", "zone; only with GCP_METADATA"),
    var(WHO, "GCE_METADATA_HOST", Kind::Text, "", "host of the metadata server; set: GCP is assumed"),
    var(WHO, "KUBERNETES_SERVICE_HOST", Kind::Text, "", "set: on Kubernetes"),
    var(ENVOY, "PROXY_CONFIG", Kind::Text, "", "ProxyConfig as YAML or JSON, over the mesh file's"),
    var(ENVOY, "PROXY_CONFIG_XDS_AGENT", Kind::Bool, "false", "take the trust bundle from istiod over xDS"),
    var(ENVOY, "ISTIO_BOOTSTRAP", Kind::Text, "", "template of Envoy's bootstrap, before every other source"),
    var(
        ENVOY,
        "ISTIO_BOOTSTRAP_OVERRIDE",
        Kind::Text,
        "",
        "YAML or JSON file handed to Envoy as --config-yaml",
    ),
    var(
        ENVOY,
        "GRPC_XDS_BOOTSTRAP",
        Kind::Text,
        "etc/istio/proxy/grpc-bootstrap.json",
        "where the proxyless gRPC bootstrap is written; empty: nowhere",
    ),
    var(
        ENVOY,
        "DISABLE_ENVOY",
        Kind::Bool,
        "false",
        "no Envoy, no SDS server: certificates are fetched and written",
    ),
    var(ENVOY, "ENVOY_STATUS_PORT", Kind::Int, "15021", "Envoy's readiness listener"),
    var(ENVOY, "ENVOY_PROMETHEUS_PORT", Kind::Int, "15090", "Envoy's metrics listener"),
    var(
        ENVOY,
        "ENVOY_STATUS_PORT_ENABLE_PROXY_PROTOCOL",
        Kind::Bool,
        "false",
        "PROXY protocol on the readiness listener",
    ),
    var(
        ENVOY,
        "PEER_METADATA_DISCOVERY",
        Kind::Bool,
        "false",
        "set: metadata discovery on or off; unset: on with ISTIO_META_ENABLE_HBONE",
    ),
    var(ENVOY, "ISTIO_DUAL_STACK", Kind::Bool, "false", "bootstrap for both address families"),
    var(ENVOY, "ISTIO_DELTA_XDS", Kind::Bool, "true", "Envoy asks for incremental updates"),
    var(
        ENVOY,
        "HTTP_STRIP_FRAGMENT_FROM_PATH_UNSAFE_IF_DISABLED",
        Kind::Bool,
        "true",
        "false adds an Envoy runtime flag",
    ),
    var(ENVOY, "COMPLIANCE_POLICY", Kind::Text, "", "fips-140-2 or pqc: limits of TLS"),
    var(ENVOY, "ENVOY_SKIP_DEPRECATED_LOGS", Kind::Bool, "true", "Envoy's --skip-deprecated-logs"),
    var(ENVOY, "ISTIO_ENVOY_ENABLE_CORE_DUMP", Kind::Bool, "false", "Envoy's --enable-core-dump"),
    var(
        ENVOY,
        "MINIMUM_DRAIN_DURATION",
        Kind::Duration,
        "5s",
        "first wait of a stop with EXIT_ON_ZERO_ACTIVE_CONNECTIONS",
    ),
    var(
        ENVOY,
        "EXIT_ON_ZERO_ACTIVE_CONNECTIONS",
        Kind::Bool,
        "false",
        "a stop ends when no connection is left",
    ),
    ours(
        ENVOY,
        "MAXIMUM_DRAIN_DURATION",
        Kind::Duration,
        "0s",
        "longest wait of a stop with EXIT_ON_ZERO_ACTIVE_CONNECTIONS; 0: none",
    ),
    ours(
        ENVOY,
        "TERMINATION_DRAIN_JITTER",
        Kind::Duration,
        "0s",
        "a stop begins its drain after a random time up to this, so that many gateways do not drain at once",
    ),
    ours(
        ENVOY,
        "ENVOY_EXIT_ALWAYS_ZERO",
        Kind::Bool,
        "false",
        "end with 0 whatever became of Envoy, as the Go agent does",
    ),
    ours(ENVOY, "ENVOY_OWN_PROCESS_GROUP", Kind::Bool, "false", "Envoy leads a process group of its own"),
    ours(
        ENVOY,
        "ENVOY_RECOVERY",
        Kind::Bool,
        "false",
        "start Envoy again after an abnormal end: ten tries, 200 ms doubling; once when memory ran out",
    ),
    ours(
        ENVOY,
        "ENVOY_HOT_RESTART",
        Kind::Bool,
        "false",
        "replace Envoy by a new epoch, without a lost request, when its configuration changes",
    ),
    ours(
        ENVOY,
        "ENVOY_PARENT_SHUTDOWN_DURATION",
        Kind::Duration,
        "60s",
        "hot restart: how long the replaced epoch lives on; more than drainDuration",
    ),
    ours(
        ENVOY,
        "ENVOY_RESTART_ON_FILES",
        Kind::Text,
        "",
        "hot restart: files, separated by commas, whose change starts a new epoch",
    ),
    var(ENVOY, "WORKLOAD_IDENTITY_SOCKET_FILE", Kind::Text, "socket", "file name of the workload SDS socket"),
    var(XDS, "XDS_ROOT_CA", Kind::Text, "", "root file for istiod, or SYSTEM"),
    var(XDS, "ISTIOD_SAN", Kind::Text, "", "TLS server name of istiod"),
    var(XDS, "GRPC_KEEPALIVE_INTERVAL", Kind::Duration, "30s", "pings to istiod and on the local socket"),
    var(XDS, "GRPC_KEEPALIVE_TIMEOUT", Kind::Duration, "10s", "how long a ping may take"),
    var(XDS, "ISTIO_GPRC_MAXSTREAMS", Kind::Int, "100000", "streams on one local connection"),
    var(
        XDS,
        "ISTIO_GPRC_MAXRECVMSGSIZE",
        Kind::Int,
        "67108864",
        "bytes of one request from Envoy (the Go agent: 4194304)",
    ),
    ours(
        XDS,
        "XDS_HOLD_TIMEOUT",
        Kind::Duration,
        "10m",
        "how long a stream of Envoy is held while istiod is dialled; 0: not at all",
    ),
    ours(
        XDS,
        "XDS_STALL_TIMEOUT",
        Kind::Duration,
        "0s",
        "end a stream on which nothing moves for so long; 0: only report it",
    ),
    var(CERT, "CA_ADDR", Kind::Text, "", "address of the CA; empty: istiod"),
    var(
        CERT,
        "CA_PROVIDER",
        Kind::Text,
        "Citadel",
        "Citadel, or GkeWorkloadCertificate for mounted certificates",
    ),
    var(CERT, "CA_ROOT_CA", Kind::Text, "", "root file for the CA, or SYSTEM"),
    var(CERT, "PROV_CERT", Kind::Text, "", "folder of the certificate that authenticates to istiod"),
    var(CERT, "OUTPUT_CERTS", Kind::Text, "", "folder to write key, chain and roots to"),
    var(CERT, "FILE_MOUNTED_CERTS", Kind::Bool, "false", "certificates come from files"),
    var(
        CERT,
        "JWT_POLICY",
        Kind::Text,
        "third-party-jwt",
        "accepted; the token's path is the same in all cases",
    ),
    var(CERT, "PILOT_CERT_PROVIDER", Kind::Text, "istiod", "which root istiod is checked with"),
    var(CERT, "CREDENTIAL_FETCHER_TYPE", Kind::Text, "JWT", "JWT or GoogleComputeEngine"),
    var(CERT, "CREDENTIAL_IDENTITY_PROVIDER", Kind::Text, "GoogleComputeEngine", "accepted as a label"),
    var(CERT, "SECRET_TTL", Kind::Duration, "24h0m0s", "validity asked for"),
    var(
        CERT,
        "SECRET_GRACE_PERIOD_RATIO",
        Kind::Float,
        "0.5",
        "share of the validity before the end at which to renew",
    ),
    var(CERT, "SECRET_GRACE_PERIOD_RATIO_JITTER", Kind::Float, "0.01", "random part of the ratio"),
    var(
        CERT,
        "FILE_DEBOUNCE_DURATION",
        Kind::Duration,
        "100ms",
        "first wait when a file pair does not match yet",
    ),
    var(CERT, "WORKLOAD_RSA_KEY_SIZE", Kind::Int, "2048", "bits of an RSA key"),
    var(CERT, "PKCS8_KEY", Kind::Bool, "false", "write keys as PKCS#8"),
    var(CERT, "ECC_SIGNATURE_ALGORITHM", Kind::Text, "", "ECDSA makes elliptic curve keys"),
    var(CERT, "ECC_CURVE", Kind::Text, "P256", "P256 or P384"),
    var(CERT, "ISTIO_META_CERT_SIGNER", Kind::Text, "", "signer named in the request"),
    var(CERT, "PILOT_ENABLE_CA_CRL", Kind::Bool, "true", "add the mounted CRL to root secrets"),
    ours(
        CERT,
        "CA_ATTEMPT_TIMEOUT",
        Kind::Duration,
        "30s",
        "how long one attempt to reach the CA may take, dial included; 0: the default",
    ),
    ours(
        CERT,
        "CA_TIMEOUT",
        Kind::Duration,
        "50s",
        "how long a request to the CA may take with all its attempts; 0: the default",
    ),
    ours(
        CERT,
        "NO_CORE_DUMPS",
        Kind::Bool,
        "false",
        "no core file of the agent, and no look at its memory (ptrace, /proc) for processes of the same user; Envoy is not concerned",
    ),
    ours(
        CERT,
        "WORKLOAD_SOCKET_WAIT",
        Kind::Duration,
        "0s",
        "how long to wait for an external SDS socket that is demanded",
    ),
    var(DNS, "ISTIO_META_DNS_CAPTURE", Kind::Bool, "false", "start the DNS server of a sidecar"),
    var(DNS, "ISTIO_META_ENABLE_DNS_SERVER", Kind::Bool, "false", "start the DNS server of any type"),
    var(DNS, "DNS_PROXY_ADDR", Kind::Text, "localhost:15053", "where it listens"),
    var(DNS, "DNS_FORWARD_PARALLEL", Kind::Bool, "false", "ask all upstream resolvers at once"),
    var(DNS, "DNS_FORWARD_TIMEOUT", Kind::Duration, "5s", "limit of an upstream query"),
    var(STATUS, "ISTIO_KUBE_APP_PROBERS", Kind::Text, "", "application probes as JSON"),
    var(STATUS, "ISTIO_PROMETHEUS_ANNOTATIONS", Kind::Text, "", "the application's metrics as JSON"),
    var(STATUS, "ISTIO_ENABLE_HTTP2_PROBING", Kind::Bool, "true", "HTTPS probes offer HTTP/2"),
    var(
        STATUS,
        "REWRITE_PROBE_LEGACY_LOCALHOST_DESTINATION",
        Kind::Bool,
        "false",
        "probe localhost in place of INSTANCE_IP",
    ),
    var(STATUS, "ENABLE_PROBE_KEEPALIVE_CONNECTIONS", Kind::Bool, "false", "keep probe connections"),
    var(STATUS, "PILOT_AGENT_MERGE_ENVOY_STATS", Kind::Bool, "true", "Envoy's metrics are part of the merge"),
    var(STATUS, "METRICS_LOCALHOST_ACCESS_ONLY", Kind::Bool, "false", "metrics only for local callers"),
    var(
        WASM,
        "ISTIO_AGENT_ENABLE_WASM_REMOTE_LOAD_CONVERSION",
        Kind::Bool,
        "true",
        "rewrite remote Wasm modules to local files",
    ),
    var(WASM, "WASM_MODULE_EXPIRY", Kind::Duration, "24h", "a module unused for so long is removed"),
    var(WASM, "WASM_PURGE_INTERVAL", Kind::Duration, "1h", "time between two looks for such modules"),
    var(
        WASM,
        "WASM_HTTP_REQUEST_TIMEOUT",
        Kind::Duration,
        "15s",
        "limit of one attempt to download a module",
    ),
    var(WASM, "WASM_HTTP_REQUEST_MAX_RETRIES", Kind::Int, "5", "attempts to download a module, in all"),
    var(
        WASM,
        "WASM_INSECURE_REGISTRIES",
        Kind::Text,
        "",
        "list of host[:port] whose certificates are not verified; `*`: all",
    ),
    var(
        WASM,
        "ISTIO_WASM_MAX_BINARY_SIZE_BYTES",
        Kind::Int,
        "268435456",
        "longest module, packed or unpacked",
    ),
    var(WASM, "DOCKER_CONFIG", Kind::Text, "", "folder of the Docker config.json with registry credentials"),
    var(WASM, "REGISTRY_AUTH_FILE", Kind::Text, "", "file with registry credentials where Docker has none"),
    var(
        WASM,
        "XDG_RUNTIME_DIR",
        Kind::Text,
        "",
        "its containers/auth.json has registry credentials, as a last resort",
    ),
    ours(
        STATUS,
        "READINESS_STRICT",
        Kind::Bool,
        "false",
        "an expired identity or a lost config source takes readiness away",
    ),
    ours(
        STATUS,
        "METRICS_PART_LIMIT_BYTES",
        Kind::Int,
        "0",
        "most bytes of one part of the merged metrics; 0: all",
    ),
    ours(
        STATUS,
        "METRICS_DETAILS",
        Kind::Bool,
        "false",
        "export families the Go agent does not have, and mark cut parts",
    ),
    ours(
        CERT,
        "ENABLE_GOOGLE_CA",
        Kind::Bool,
        "false",
        "allow CA_PROVIDER GoogleCA and GoogleCAS, which left the Go agent in 1.23",
    ),
    ours(CERT, "GKE_CLUSTER_URL", Kind::Text, "", "cluster named to Google's Mesh CA"),
    ours(
        CERT,
        "GOOGLE_CAS_ENDPOINT",
        Kind::Text,
        "privateca.googleapis.com:443",
        "address of Google's Certificate Authority Service; CA_ADDR is its pool",
    ),
];

/// Variables whose names are open: what they begin with or are, and what becomes of them.
pub const FAMILIES: &[(&str, &str)] = &[
    ("ISTIO_META_<KEY>", "node metadata `<KEY>`; beats the entry of the same name in `proxyMetadata`"),
    (
        "ISTIO_METAJSON_<X>",
        "JSON object whose members become node metadata; `ISTIO_METAJSON_LABELS` also fills labels",
    ),
    ("XDS_HEADER_<NAME>", "header `<NAME>` of calls to istiod; the value may hold `=` and is never logged"),
    ("CA_HEADER_<NAME>", "header `<NAME>` of calls to the CA; never logged"),
    (
        "HTTPS_PROXY, HTTP_PROXY, NO_PROXY",
        "way through an HTTP proxy: to istiod and the CA (the first), to module servers and registries; lower case too",
    ),
    ("SSL_CERT_FILE, SSL_CERT_DIR", "where the system's roots are"),
    ("everything", "is handed on to Envoy as it is"),
];

/// Known to the Go agent's binary without effect on `proxy`, and so here.
pub const WITHOUT_EFFECT: &[&str] = &[
    "ENABLE_VTPROTOBUF",
    "GOMAXPROCS",
    "GOMEMLIMIT",
    "ISTIO_ENABLE_CONTROLLER_QUEUE_METRICS",
    "RESOLVE_HOSTNAME_GATEWAYS",
    "TOKEN_AUDIENCES",
    "UNSAFE_PILOT_ENABLE_RUNTIME_ASSERTIONS",
    "XDS_AUTH",
    "XDS_AUTH_PLAINTEXT",
    "XDS_AUTH_PROVIDER",
];
