//! The one table of variables: name, type, default and meaning. A row is everything that is said of a variable;
//! the typed key, the documentation and the effective configuration come from it.

use std::marker::PhantomData;

/// The type of a variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
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
pub(crate) struct Var {
    /// Its name.
    pub name: &'static str,
    /// Its type.
    pub kind: Kind,
    /// Its default, as text.
    pub default: &'static str,
    /// Its meaning.
    #[cfg_attr(not(test), allow(dead_code, reason = "for docs/CONFIG.md, which a test makes"))]
    pub help: &'static str,
    /// Which part it belongs to, as docs/CONFIG.md groups them.
    pub part: &'static str,
    /// The Go agent has no such variable.
    pub ours: bool,
}

const WHO: &str = "Identity and place";
const ENVOY: &str = "Proxy config, bootstrap, Envoy";
const XDS: &str = "Config path";
const CERT: &str = "Certificates and CA";
const DNS: &str = "DNS proxy";
const STATUS: &str = "Status server";
const WASM: &str = "Wasm";
/// Read by `istio-iptables` and not under `proxy`.
pub(crate) const REDIRECT: &str = "Redirection (`istio-iptables`)";

/// A variable by its place in the table; `T` is a type of [`kinds`]. Only [`var`] has values of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Key<T> {
    pub(super) place: usize,
    of: PhantomData<T>,
}

impl<T> Key<T> {
    /// The variable's name.
    #[must_use]
    pub(crate) const fn name(self) -> &'static str {
        VARS[self.place].name
    }
}

/// The types of variables, so that reading one as another does not compile.
pub(crate) mod kinds {
    /// Marks a text.
    #[derive(Debug, Clone, Copy)]
    pub(crate) struct Text;
    /// Marks a boolean.
    #[derive(Debug, Clone, Copy)]
    pub(crate) struct Bool;
    /// Marks an integer.
    #[derive(Debug, Clone, Copy)]
    pub(crate) struct Int;
    /// Marks a decimal number.
    #[derive(Debug, Clone, Copy)]
    pub(crate) struct Float;
    /// Marks a duration.
    #[derive(Debug, Clone, Copy)]
    pub(crate) struct Duration;
}

macro_rules! variables {
    ($($origin:ident $part:ident $name:ident: $kind:ident = $default:literal, $help:literal;)*) => {
        #[allow(dead_code, non_camel_case_types, clippy::upper_case_acronyms, reason = "names of variables")]
        enum Place { $($name),* }

        /// Every variable as a constant of its own name: what is not declared here cannot be read.
        pub(crate) mod var {
            #![allow(dead_code, reason = "some are read as they were given, by name")]
            use super::{Key, PhantomData, Place, kinds};
            $(
                #[doc = concat!("Key of `", stringify!($name), "`.")]
                pub(crate) const $name: Key<kinds::$kind> = Key { place: Place::$name as usize, of: PhantomData };
            )*
        }

        /// Every variable the agent reads under `proxy`, and those of `istio-iptables` that are no flag's.
        pub(crate) const VARS: &[Var] = &[$(Var {
            name: stringify!($name),
            kind: Kind::$kind,
            default: $default,
            help: $help,
            part: $part,
            ours: is_ours(stringify!($origin)),
        }),*];
    };
}

const fn is_ours(origin: &str) -> bool {
    matches!(origin.as_bytes(), b"ours")
}

// origin (the Go agent's or ours), part, name: type = default, meaning
variables! {
    go WHO INSTANCE_IP: Text = "", "address of the pod: first of the node's addresses, target of application probes";
    go WHO POD_NAME: Text = "", "first part of the node id";
    go WHO POD_NAMESPACE: Text = "", "second part of the node id, namespace of the identity";
    go WHO SERVICE_ACCOUNT: Text = "", "service account of the identity";
    go WHO HOST_IP: Text = "", "replaces $(HOST_IP) in tracer addresses and in the bootstrap override";
    go WHO ISTIO_CPU_LIMIT: Int = "0", "CPU limit in cores; Envoy's threads where concurrency is unset";
    go WHO GOMEMLIMIT: Text = "", "memory of the agent itself (bytes, or as 64MiB), near which connections that are worth least are closed; off or empty: its control group's limit alone counts";
    go WHO TRUST_DOMAIN: Text = "cluster.local", "SPIFFE trust domain of the identity";
    go WHO ISTIO_META_CLUSTER_ID: Text = "", "cluster id sent with every call to istiod";
    go WHO CLOUD_PLATFORM: Text = "", "aws, azure, gcp or none; anything else: found out";
    go WHO GCP_METADATA: Text = "", "PROJECT_ID|PROJECT_NUMBER|CLUSTER_NAME|CLUSTER_ZONE";
    go WHO GCP_QUOTA_PROJECT: Text = "", "quota project; only with GCP_METADATA";
    go WHO GCP_ZONE: Text = "", "zone; only with GCP_METADATA";
    go WHO GCE_METADATA_HOST: Text = "", "host of the metadata server; set: GCP is assumed";
    go WHO KUBERNETES_SERVICE_HOST: Text = "", "set: on Kubernetes";
    ours WHO ISTIO_COMPAT_VERSION: Text = "1.31", "release to follow where two exclude each other: 1.31, or 1.30 for what 1.31 refuses or shows";
    go ENVOY PROXY_CONFIG: Text = "", "ProxyConfig as YAML or JSON, over the mesh file's";
    go ENVOY PROXY_CONFIG_XDS_AGENT: Bool = "false", "take the trust bundle from istiod over xDS";
    go ENVOY ISTIO_BOOTSTRAP: Text = "", "template of Envoy's bootstrap, before every other source";
    go ENVOY ISTIO_BOOTSTRAP_OVERRIDE: Text = "", "YAML or JSON file handed to Envoy as --config-yaml";
    go ENVOY GRPC_XDS_BOOTSTRAP: Text = "etc/istio/proxy/grpc-bootstrap.json", "where the proxyless gRPC bootstrap is written; empty: nowhere";
    go ENVOY DISABLE_ENVOY: Bool = "false", "no Envoy, no SDS server: certificates are fetched and written";
    go ENVOY ENVOY_STATUS_PORT: Int = "15021", "Envoy's readiness listener";
    go ENVOY ENVOY_PROMETHEUS_PORT: Int = "15090", "Envoy's metrics listener";
    go ENVOY ENVOY_SECURE_METRICS_PORT: Int = "0", "Envoy's metrics behind mutual TLS; 0: none; since 1.31";
    go ENVOY ENVOY_SECURE_MERGED_METRICS_PORT: Int = "0", "the merged metrics behind mutual TLS; 0: none; since 1.31";
    go ENVOY ENVOY_STATUS_PORT_ENABLE_PROXY_PROTOCOL: Bool = "false", "PROXY protocol on the readiness listener";
    go ENVOY PEER_METADATA_DISCOVERY: Bool = "false", "set: metadata discovery on or off; unset: on with ISTIO_META_ENABLE_HBONE";
    go ENVOY ISTIO_DUAL_STACK: Bool = "false", "bootstrap for both address families";
    go ENVOY ISTIO_DELTA_XDS: Bool = "true", "Envoy asks for incremental updates";
    go ENVOY HTTP_STRIP_FRAGMENT_FROM_PATH_UNSAFE_IF_DISABLED: Bool = "true", "false adds an Envoy runtime flag";
    go ENVOY COMPLIANCE_POLICY: Text = "", "fips-140-2, fips-140-3 or pqc: limits of TLS";
    ours ENVOY FIPS_MODULE_REQUIRED: Bool = "false", "a build without the crypto library's FIPS module does not start (docs/FIPS.md)";
    go ENVOY ENVOY_SKIP_DEPRECATED_LOGS: Bool = "true", "Envoy's --skip-deprecated-logs";
    go ENVOY ISTIO_ENVOY_ENABLE_CORE_DUMP: Bool = "false", "Envoy's --enable-core-dump";
    go ENVOY MINIMUM_DRAIN_DURATION: Duration = "5s", "first wait of a stop with EXIT_ON_ZERO_ACTIVE_CONNECTIONS";
    go ENVOY EXIT_ON_ZERO_ACTIVE_CONNECTIONS: Bool = "false", "a stop ends when no connection is left";
    go ENVOY TERMINATION_DRAIN_DURATION_SECONDS: Int = "5", "of releases up to 1.8: terminationDrainDuration in seconds, below every ProxyConfig";
    ours ENVOY MAXIMUM_DRAIN_DURATION: Duration = "0s", "longest wait of a stop with EXIT_ON_ZERO_ACTIVE_CONNECTIONS; 0: none";
    ours ENVOY TERMINATION_DRAIN_JITTER: Duration = "0s", "a stop begins its drain after a random time up to this, so that many gateways do not drain at once";
    ours ENVOY DRAINED_ENVOY_LIMIT: Duration = "0s", "an Envoy that /drain has drained and that nobody ends for so long is killed, and the agent ends with 0; 0: never";
    ours ENVOY DRAIN_COUNT_REQUESTS: Bool = "false", "a stop with EXIT_ON_ZERO_ACTIVE_CONNECTIONS also counts requests under way, for the log and a metric";
    ours ENVOY ENVOY_EXIT_ALWAYS_ZERO: Bool = "false", "end with 0 whatever became of Envoy, as the Go agent does";
    ours ENVOY ENVOY_EXTERNAL: Bool = "false", "Envoy is somebody else's: its bootstrap is written and its APIs are served, it is neither started nor ended";
    ours ENVOY ENVOY_OWN_PROCESS_GROUP: Bool = "false", "Envoy leads a process group of its own";
    ours ENVOY ENVOY_RECOVERY: Bool = "false", "start Envoy again after an abnormal end: ten tries, 200 ms doubling; once when memory ran out";
    ours ENVOY ENVOY_HOT_RESTART: Bool = "false", "replace Envoy by a new epoch, without a lost request, when the template, customConfigFile, ISTIO_BOOTSTRAP_OVERRIDE or a file of ENVOY_RESTART_ON_FILES changes";
    ours ENVOY AGENT_UPGRADE: Bool = "false", "the agent may be replaced by a new version while Envoy runs on: by pilot-agent upgrade (socket UPGRADE in configPath, for root and the agent's user) and SIGUSR2";
    ours ENVOY AGENT_UPGRADE_TIMEOUT: Duration = "30s", "how long a new program may take to be tried, and as long again until it serves; then the old one goes on; more than 0";
    ours ENVOY ENVOY_PARENT_SHUTDOWN_DURATION: Duration = "60s", "hot restart: how long the replaced epoch lives on; more than drainDuration";
    ours ENVOY ENVOY_RESTART_ON_FILES: Text = "", "hot restart: files, separated by commas, whose change starts a new epoch";
    go ENVOY WORKLOAD_IDENTITY_SOCKET_FILE: Text = "socket", "file name of the workload SDS socket";
    go XDS XDS_ROOT_CA: Text = "", "root file for istiod, or SYSTEM";
    go XDS ISTIOD_SAN: Text = "", "TLS server name of istiod";
    go XDS GRPC_KEEPALIVE_INTERVAL: Duration = "30s", "pings to istiod and on the local socket";
    go XDS GRPC_KEEPALIVE_TIMEOUT: Duration = "10s", "how long a ping may take";
    go XDS ISTIO_GPRC_MAXSTREAMS: Int = "100000", "streams on one local connection; the whole socket has 2048";
    go XDS ISTIO_GPRC_MAXRECVMSGSIZE: Int = "67108864", "bytes of one request from Envoy (the Go agent: 4194304)";
    ours XDS XDS_HOLD_TIMEOUT: Duration = "10m", "how long a stream of Envoy is held while istiod is dialled; 0: not at all";
    ours XDS XDS_RECONNECT_SPREAD: Duration = "0s", "over how long all agents of a mesh come back after istiod was away or ended their streams, each at a random moment; as long for each, up to 10m (docs/SCALE.md); 0: each within seconds";
    ours XDS XDS_SHUFFLE_ADDRESSES: Bool = "false", "istiod's addresses are tried in random order, not in the resolver's";
    ours XDS XDS_STREAM_MAX_AGE: Duration = "0s", "a stream to istiod ends after this time, a tenth more or less, so that a new istiod gets its share; 0: never";
    ours XDS XDS_REPLAY: Text = "off", "keep the last configuration that Envoy has accepted, for an Envoy that starts while istiod is away: off, memory, or disk (over a restart of agent and machine, too)";
    ours XDS XDS_REPLAY_AFTER: Duration = "1s", "how long istiod is waited for before Envoy is answered from memory; a connection that fails ends the wait";
    ours XDS XDS_REPLAY_DIR: Text = "", "folder of XDS_REPLAY=disk and IDENTITY_PERSIST; empty: last-good in configPath";
    ours XDS XDS_REPLAY_MAX_AGE: Duration = "24h", "a configuration on disk that istiod has not confirmed for so long is not used any more; more than 0";
    ours XDS XDS_REPLAY_MAX_BYTES: Int = "67108864", "compressed bytes of it at most; a larger configuration is not kept; more than 0";
    ours XDS XDS_STALL_TIMEOUT: Duration = "5m", "end a stream on which less than 16 KB move in so long though more wait; 0: only report it";
    go CERT CA_ADDR: Text = "", "address of the CA; empty: istiod";
    go CERT CA_PROVIDER: Text = "Citadel", "Citadel (or Istiod), GkeWorkloadCertificate for mounted certificates, GoogleCA, GoogleCAS, VaultCA";
    go CERT CA_ROOT_CA: Text = "", "root file for the CA, or SYSTEM";
    go CERT PROV_CERT: Text = "", "folder of the certificate that authenticates to istiod";
    go CERT OUTPUT_CERTS: Text = "", "folder to write key, chain and roots to";
    go CERT FILE_MOUNTED_CERTS: Bool = "false", "certificates come from files";
    go CERT JWT_POLICY: Text = "third-party-jwt", "first-party-jwt: the pod's own token is sent where there is no istio-token (releases up to 1.20); any other value: as third-party-jwt";
    go CERT PILOT_CERT_PROVIDER: Text = "istiod", "which root istiod is checked with";
    go CERT CREDENTIAL_FETCHER_TYPE: Text = "JWT", "JWT or GoogleComputeEngine; Mock: a made-up token, for tests";
    go CERT CREDENTIAL_IDENTITY_PROVIDER: Text = "GoogleComputeEngine", "identity provider named in token exchanges with CREDENTIAL_FETCHER_TYPE=GoogleComputeEngine";
    go CERT SECRET_TTL: Duration = "24h0m0s", "validity asked for";
    go CERT SECRET_GRACE_PERIOD_RATIO: Float = "0.5", "share of the validity before the end at which to renew";
    go CERT SECRET_GRACE_PERIOD_RATIO_JITTER: Float = "0.01", "random part of the ratio";
    go CERT FILE_DEBOUNCE_DURATION: Duration = "100ms", "first wait when a file pair does not match yet";
    go CERT WORKLOAD_RSA_KEY_SIZE: Int = "2048", "bits of an RSA key";
    go CERT PKCS8_KEY: Bool = "false", "write keys as PKCS#8";
    go CERT ECC_SIGNATURE_ALGORITHM: Text = "", "ECDSA makes elliptic curve keys";
    go CERT ECC_CURVE: Text = "P256", "P256 or P384";
    go CERT ISTIO_META_CERT_SIGNER: Text = "", "signer named in the request";
    go CERT PILOT_ENABLE_CA_CRL: Bool = "true", "add the mounted CRL to root secrets";
    ours CERT CA_ATTEMPT_TIMEOUT: Duration = "30s", "how long one attempt to reach the CA may take, dial included; 0: the default";
    ours CERT CA_TIMEOUT: Duration = "50s", "how long a request to the CA may take with all its attempts; 0: the default";
    ours CERT NO_CORE_DUMPS: Bool = "false", "no core file of the agent, and no look at its memory (ptrace, /proc) for processes of the same user; Envoy is not concerned";
    ours CERT WORKLOAD_SOCKET_WAIT: Duration = "0s", "how long to wait for somebody else's SDS server on the workload socket; on the default name this agent serves when nobody came";
    ours CERT SDS_ALLOWED_UIDS: Text = "", "users that may connect to the SDS sockets beside the agent's own and that of the Envoy it starts, numbers separated by commas; empty: all";
    ours CERT RENEWAL_EARLY: Bool = "false", "while there is trouble on the way to istiod, ask for a new certificate before it is due, again and again";
    ours CERT IDENTITY_NEAR_EXPIRY: Text = "ignore", "when the certificate is about to expire through a fault of this proxy's own: ignore, unready, or exit";
    ours CERT IDENTITY_NEAR_EXPIRY_BEFORE: Duration = "5m", "how long before the end of validity that is";
    ours CERT IDENTITY_NEAR_EXPIRY_JITTER: Duration = "1m", "and how much earlier at random";
    ours CERT IDENTITY_PERSIST: Bool = "false", "keep key and certificate in XDS_REPLAY_DIR (mode 0600), for a start while the CA is away";
    ours CERT IDENTITY_PERSIST_KEY: Text = "", "a file (mode 0600 or less, 32 bytes at least) whose content seals the key of IDENTITY_PERSIST; empty: it is not sealed";
    go DNS ISTIO_META_DNS_CAPTURE: Bool = "false", "start the DNS server of a sidecar";
    go DNS ISTIO_META_ENABLE_DNS_SERVER: Bool = "false", "start the DNS server of any type";
    go DNS DNS_PROXY_ADDR: Text = "localhost:15053", "where it listens; when set, istiod is told in node metadata of this name. Port 53 takes root: else the default is used, with a line in the log; by root Envoy then runs as user 1337, and /var/lib/istio/resolv.conf names the resolvers where it is there";
    go DNS DNS_FORWARD_PARALLEL: Bool = "false", "ask all upstream resolvers at once";
    go DNS DNS_FORWARD_TIMEOUT: Duration = "5s", "limit of an upstream query";
    ours DNS DNS_FORWARD_ADAPTIVE: Bool = "false", "resolv.conf is read again when it changes, resolvers that answer are asked first, a query is sent again within DNS_FORWARD_TIMEOUT, and a cut answer is fetched over TCP";
    ours DNS DNS_SERVE_STALE: Duration = "0s", "when no resolver answers: the last answer, for so long after its time; 30s at most";
    ours DNS DNS_CACHE_MAX_TTL: Duration = "0s", "keep answers that hold records for their time, and for this at most; 0: not at all";
    go STATUS ISTIO_KUBE_APP_PROBERS: Text = "", "application probes as JSON";
    go STATUS ISTIO_PROMETHEUS_ANNOTATIONS: Text = "", "the application's metrics as JSON: scrape, port, path, and since 1.31 targets, a list of port and path";
    go STATUS ISTIO_ENABLE_HTTP2_PROBING: Bool = "true", "HTTPS probes offer HTTP/2";
    go STATUS REWRITE_PROBE_LEGACY_LOCALHOST_DESTINATION: Bool = "false", "probe localhost in place of INSTANCE_IP";
    go STATUS ENABLE_PROBE_KEEPALIVE_CONNECTIONS: Bool = "false", "keep probe connections";
    go STATUS PILOT_AGENT_MERGE_ENVOY_STATS: Bool = "true", "Envoy's metrics are part of the merge";
    go STATUS METRICS_LOCALHOST_ACCESS_ONLY: Bool = "false", "metrics only for local callers";
    go WASM ISTIO_AGENT_ENABLE_WASM_REMOTE_LOAD_CONVERSION: Bool = "true", "rewrite remote Wasm modules to local files";
    go WASM WASM_MODULE_EXPIRY: Duration = "24h", "a module unused for so long is removed";
    go WASM WASM_PURGE_INTERVAL: Duration = "1h", "time between two looks for such modules";
    go WASM WASM_HTTP_REQUEST_TIMEOUT: Duration = "15s", "limit of one attempt to download a module";
    go WASM WASM_HTTP_REQUEST_MAX_RETRIES: Int = "5", "attempts to download a module, in all";
    go WASM WASM_INSECURE_REGISTRIES: Text = "", "list of host[:port] whose certificates are not verified; `*`: all";
    go WASM ISTIO_WASM_MAX_BINARY_SIZE_BYTES: Int = "268435456", "longest module, packed or unpacked";
    go WASM DOCKER_CONFIG: Text = "", "folder of the Docker config.json with registry credentials; empty: .docker in HOME";
    go WASM REGISTRY_AUTH_FILE: Text = "", "file with registry credentials where Docker has none";
    go WASM XDG_RUNTIME_DIR: Text = "", "its containers/auth.json has registry credentials, as a last resort";
    ours STATUS READINESS_STRICT: Bool = "false", "an expired identity, a lost config source, tokens that cannot be exchanged or a gateway's missing secret takes readiness away";
    ours STATUS METRICS_PART_LIMIT_BYTES: Int = "0", "most bytes of one part of the merged metrics; 0: all";
    ours STATUS METRICS_DETAILS: Bool = "false", "export families the Go agent does not have, and mark cut parts";
    ours CERT ENABLE_GOOGLE_CA: Bool = "false", "a CA_ADDR of googleapis.com means GoogleCA without being named by CA_PROVIDER";
    ours CERT GKE_CLUSTER_URL: Text = "", "address of the GKE cluster: routing of Google's Mesh CA, identity provider in token exchanges";
    ours CERT ENABLE_INGRESS_GATEWAY_SDS: Bool = "false", "serve secrets of the namespace to a gateway's Envoy; on in a router with the folder /var/run/ingress_gateway (as in 1.1 to 1.5)";
    ours CERT INGRESS_GATEWAY_NAMESPACE: Text = "", "whose secrets a gateway is served; empty: the pod's namespace";
    ours CERT INGRESS_GATEWAY_FALLBACK_SECRET: Text = "gateway-fallback", "secret that is served in place of one that does not exist; empty: none";
    ours CERT SECRET_WATCHER_RESYNC_PERIOD: Duration = "0s", "time after which secrets of gateways are listed anew; 0: only when a watch ends";
    ours CERT KUBERNETES_SERVICE_PORT: Text = "443", "port of the API server";
    ours CERT SDS_CALLER_TOKENS: Bool = "false", "a socket on which each caller brings its own token and gets a certificate for it (node agents of 1.1 to 1.4)";
    ours CERT WORKLOAD_SDS: Text = "", "path of that socket; empty: /var/run/sds/uds_path";
    ours CERT PLUGINS: Text = "", "GoogleTokenExchange: the token is exchanged for Google's federated one before it goes to the CA (as in 1.1 to 1.5)";
    ours CERT VAULT_ADDR: Text = "", "VaultCA: address of the Vault, https://host:8200";
    ours CERT VAULT_ROLE: Text = "", "VaultCA: role to log in as";
    ours CERT VAULT_AUTH_PATH: Text = "", "VaultCA: where to log in, such as auth/kubernetes/login";
    ours CERT VAULT_SIGN_CSR_PATH: Text = "", "VaultCA: what signs, such as istio_ca/sign/istio-pki-role";
    ours CERT VAULT_TLS_ROOT_CERT: Text = "", "VaultCA: certificate in PEM, or a file with it, trusted beside the system's roots";
    ours CERT VAULT_NAMESPACE: Text = "", "VaultCA: namespace of the Vault";
    ours CERT STS_PORT: Text = "", "--stsPort where the flag is not given; counts only beside TOKEN_MANAGER_PLUGIN";
    ours CERT TOKEN_MANAGER_PLUGIN: Text = "", "--tokenManagerPlugin where the flag is not given";
    ours CERT STS_UPSTREAM_URL: Text = "", "token endpoint (RFC 8693) of the plugin Passthrough";
    ours CERT STS_UPSTREAM_AUDIENCE: Text = "", "audience that the plugin Passthrough asks for where the caller names none";
    ours CERT GOOGLE_CAS_ENDPOINT: Text = "privateca.googleapis.com:443", "address of Google's Certificate Authority Service; CA_ADDR is its pool";
    go REDIRECT ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR: Text = "127.0.0.1/32", "loopback addresses of IPv4 that count as the pod's own";
    go REDIRECT ISTIO_OUTBOUND_OWNER_GROUPS: Text = "*", "groups whose outbound traffic is captured; * for all";
    go REDIRECT ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE: Text = "", "groups whose outbound traffic is left alone, with ISTIO_OUTBOUND_OWNER_GROUPS=*";
    go REDIRECT ENVOY_USER: Text = "istio-proxy", "user whose number stands for --proxy-uid where that is empty";
    go REDIRECT INVALID_DROP: Bool = "false", "as DROP_INVALID, and before it";
    go REDIRECT DRY_RUN_FILE_PATH: Text = "", "file that --dry-run also writes the rules to";
}

/// Variables whose names are open: what they begin with or are, and what becomes of them.
#[cfg(test)]
pub(crate) const FAMILIES: &[(&str, &str)] = &[
    ("ISTIO_META_<KEY>", "node metadata `<KEY>`; beats the entry of the same name in `proxyMetadata`"),
    (
        "ISTIO_METAJSON_<X>",
        "JSON object whose members become node metadata; `ISTIO_METAJSON_LABELS` also fills labels",
    ),
    ("XDS_HEADER_<NAME>", "header `<NAME>` of calls to istiod; the value may hold `=` and is never logged"),
    ("CA_HEADER_<NAME>", "header `<NAME>` of calls to the CA; never logged"),
    (
        "HTTPS_PROXY, HTTP_PROXY, NO_PROXY",
        "way through an HTTP proxy: to istiod and the CA (the first; Vault by its URL), to module servers and registries, not to servers that exchange tokens; lower case too",
    ),
    ("SSL_CERT_FILE, SSL_CERT_DIR", "where the system's roots are"),
    (
        "NOTIFY_SOCKET, WATCHDOG_USEC, WATCHDOG_PID",
        "systemd's, of a unit with `Type=notify` and `WatchdogSec=`: it is told of readiness, state and life",
    ),
    ("everything", "is handed on to Envoy as it is"),
];

/// Variables of releases up to 1.12 that are accepted, and why they have no effect.
#[cfg(test)]
pub(crate) const OLDER: &[(&str, &str)] = &[
    ("PROXY_XDS_VIA_AGENT", "Envoy's configuration always goes by the agent, as in every release since 1.9"),
    ("CALL_CREDENTIALS", "the token goes with every call, whatever carries it"),
    (
        "STALED_CONNECTION_RECYCLE_RUN_INTERVAL",
        "a stream ends with its connection, nothing is left to recycle",
    ),
    (
        "SECRET_GRACE_PERIOD_DURATION",
        "a share of the validity counts, not a time before its end: SECRET_GRACE_PERIOD_RATIO",
    ),
    ("SECRET_ROTATION_CHECK_INTERVAL", "a certificate has its own timer: SECRET_GRACE_PERIOD_RATIO"),
    (
        "INITIAL_BACKOFF_MSEC",
        "the pauses between attempts are fixed; CA_ATTEMPT_TIMEOUT and CA_TIMEOUT bound them",
    ),
];

/// Known to the Go agent's binary without effect on `proxy`, and so here.
pub(crate) const WITHOUT_EFFECT: &[&str] = &[
    "ENABLE_VTPROTOBUF",
    "GOMAXPROCS",
    "ISTIO_ENABLE_CONTROLLER_QUEUE_METRICS",
    "RESOLVE_HOSTNAME_GATEWAYS",
    "TOKEN_AUDIENCES",
    "UNSAFE_PILOT_ENABLE_RUNTIME_ASSERTIONS",
    "XDS_AUTH",
    "XDS_AUTH_PLAINTEXT",
    "XDS_AUTH_PROVIDER",
];
