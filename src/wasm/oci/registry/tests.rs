use std::sync::Arc;

use super::*;
use crate::fetch::fake::{Web as Server, http as page};
use crate::wasm::Config;

fn web() -> Web {
    let config = Config {
        dir: "/nonexistent".into(),
        expiry: Duration::ZERO,
        purge_interval: Duration::ZERO,
        http_timeout: Duration::ZERO,
        http_attempts: 0,
        insecure: Vec::new(),
        max_size: 0,
        credentials: Vec::new(),
        proxies: crate::fetch::Proxies::default(),
    };
    Web::new(config, Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
}

async fn token(secret: &str, realm: &str) -> Result<String, Error> {
    let (web, reference) = (web(), Reference::parse("r.io/team/plug").unwrap());
    let secret = Secret::Given(secret.to_owned().into());
    let until = Instant::now() + Duration::from_secs(20);
    let registry = Registry::new(&web, &reference, &secret, until).await?;
    registry.token(realm, "the service", &[]).await.map(|token| token.to_string())
}

#[tokio::test]
async fn tokens_are_asked_for_as_the_credentials_say() {
    let server = Server::start(|head| {
        if head.starts_with("POST") {
            page(200, "", "{\"access_token\": \"posted\"}")
        } else {
            page(200, "", "{\"token\": \"got\"}")
        }
    })
    .await;
    let realm = format!("http://{}/token?a=b", server.addr);
    let of = |entry: &str| format!("{{\"auths\": {{\"r.io\": {entry}}}}}");
    assert_eq!(token("{}", &realm).await.unwrap(), "got");
    let head = server.heads().remove(0).to_lowercase();
    let target = "get /token?a=b&scope=repository%3ateam%2fplug%3apull&service=the%20service http/1.1";
    assert!(head.starts_with(target) && !head.contains("authorization"), "{head}");
    assert_eq!(token(&of("{\"username\": \"u\", \"password\": \"p\"}"), &realm).await.unwrap(), "got");
    assert!(server.heads()[1].contains("Authorization: Basic dTpw"), "{}", server.heads()[1]);
    assert_eq!(token(&of("{\"identitytoken\": \"i\"}"), &realm).await.unwrap(), "posted");
    assert_eq!(token(&of("{\"registrytoken\": \"mine\"}"), &realm).await.unwrap(), "mine");
    assert_eq!(server.heads().len(), 3);
}

#[tokio::test]
async fn what_a_token_is_not_good_for_is_asked_for_before_the_right_to_pull() {
    let server = Server::start(|head| {
        let scopes =
            ["repository:base:pull", "repository:base:pull", &"a".repeat(2000), "repository:team/plug:pull"];
        let wants = |scope| format!("WWW-Authenticate: Bearer realm=\"http://r.io/t\",scope=\"{scope}\"\r\n");
        if head.starts_with("GET /token") || head.starts_with("POST /token") {
            page(200, "", "{\"token\": \"good\"}")
        } else if head.contains("Bearer good") {
            page(200, "", "")
        } else {
            page(401, &scopes.map(wants).concat(), "")
        }
    })
    .await;
    let (web, reference) = (web(), Reference::parse("r.io/team/plug").unwrap());
    let mut registry = at(&web, &reference, &server).await;
    registry.bearer = Some((format!("http://{}/token", server.addr), "s".to_owned()));
    registry.authorization = Some(HeaderValue::from_static("Bearer old"));
    registry.ask("/manifest", None).await.unwrap();
    let asked = server.heads()[1].to_lowercase();
    let both = "scope=repository%3abase%3apull&scope=repository%3ateam%2fplug%3apull&service=s";
    assert!(asked.starts_with(&format!("get /token?{both} http/1.1")), "{asked}");
}

#[tokio::test]
async fn tokens_come_in_the_forms_that_servers_give_them() {
    for (answer, good) in [
        ("{\"token\": null, \"access_token\": \"a\"}", Some("a")),
        ("{\"token\": \"t\", \"access_token\": \"a\"}", Some("a")),
        ("{\"token\": \"t\", \"access_token\": \"\"}", Some("t")),
        ("{\"token\": null}", None),
    ] {
        let server = Server::start(move |_| page(200, "", answer)).await;
        let given = token("{}", &format!("http://{}/token", server.addr)).await;
        assert_eq!(given.as_deref().ok(), good, "{answer}");
    }
    // A server that exchanges nothing gives its token to a user and password.
    let server = Server::start(|head| {
        if head.starts_with("POST") { page(404, "", "") } else { page(200, "", "{\"token\": \"got\"}") }
    })
    .await;
    let auths = "{\"auths\": {\"r.io\": {\"auth\": \"dTpw\", \"identitytoken\": \"i\"}}}";
    assert_eq!(token(auths, &format!("http://{}/token", server.addr)).await.unwrap(), "got");
    assert!(server.heads()[1].contains("Authorization: Basic dTpw"), "{:?}", server.heads());
}

#[tokio::test]
async fn a_token_that_is_given_is_used_whatever_the_registry_asks_for() {
    for (status, said) in [(200, ""), (401, "WWW-Authenticate: Basic realm=\"r\"\r\n")] {
        let server = Server::start(move |_| page(status, said, "")).await;
        let (web, reference) = (web(), Reference::parse(&format!("{}/plug", server.addr)).unwrap());
        let mut registry = at(&web, &reference, &server).await;
        registry.credentials.registry = Some("mine".to_owned().into());
        registry.open().await.unwrap();
        assert_eq!(registry.authorization.as_ref().unwrap(), "Bearer mine", "{status}");
    }
}

#[tokio::test]
async fn what_the_registry_is_told_goes_to_no_other_port() {
    let other = Server::start(|_| page(200, "", "layer")).await;
    let there = format!("Location: http://{}/layer\r\n", other.addr);
    let server = Server::start(move |head| {
        if head.starts_with("GET /away") {
            page(307, &there, "")
        } else {
            page(307, "Location: /away\r\n", "")
        }
    })
    .await;
    let (web, reference) = (web(), Reference::parse("r.io/team/plug").unwrap());
    let mut registry = at(&web, &reference, &server).await;
    registry.authorization = Some(HeaderValue::from_static("Bearer secret"));
    registry.ask("/layer", None).await.unwrap();
    assert!(server.heads().iter().all(|head| head.contains("Bearer secret")), "{:?}", server.heads());
    assert!(!other.heads()[0].to_lowercase().contains("authorization"), "{:?}", other.heads());
}

#[tokio::test]
async fn a_registry_that_is_no_neighbour_is_asked_in_plain_http_only_after_nonsense() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    for answers in [true, false] {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut server = crate::base::tasks::Set::new("test server");
        server.spawn(async move {
            let mut asked_plainly = false;
            while let Ok(Ok((mut stream, _))) =
                tokio::time::timeout(Duration::from_secs(2), listener.accept()).await
            {
                let mut first = [0; 1];
                let _ = stream.read_exact(&mut first).await;
                if first[0] != 0x16 {
                    asked_plainly = true;
                    let _ = stream.read(&mut [0; 4096]).await;
                    let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
                    break;
                }
                if answers {
                    let _ = stream.read(&mut [0; 4096]).await;
                    let _ = stream.write_all(b"SSH-2.0-nonsense\r\n").await;
                }
            }
            asked_plainly
        });
        // This machine by an address that no neighbour has.
        let reference = Reference::parse(&format!("[::ffff:127.0.0.1]:{port}/plug")).unwrap();
        assert!(!reference.may_be_plain());
        let (web, secret) = (web(), Secret::Given("{}".to_owned().into()));
        let registry =
            Registry::new(&web, &reference, &secret, Instant::now() + Duration::from_secs(20)).await.unwrap();
        assert_eq!(registry.ping().await.is_ok(), answers);
        assert_eq!(
            std::future::poll_fn(|cx| server.poll_next(cx)).await,
            answers,
            "without an answer plain HTTP is not tried"
        );
    }
}

#[tokio::test]
async fn a_disk_that_does_not_answer_is_waited_for_no_longer_than_the_registry() {
    use crate::wasm::download::STORE;
    let server = Server::start(|_| page(200, "", "layer")).await;
    let (web, reference) = (web(), Reference::parse("r.io/team/plug").unwrap());
    let (secret, until) =
        (Secret::Given("{}".to_owned().into()), Instant::now() + Duration::from_millis(300));
    let mut registry = Registry::new(&web, &reference, &secret, until).await.unwrap();
    registry.base = format!("http://{}", server.addr);
    // As many as may be stored at a time stand still.
    let mut held = Vec::new();
    for _ in 0..4 {
        let (let_go, hold) = std::sync::mpsc::channel::<()>();
        let mut storing = Box::pin(STORE.run(move || {
            let _ = hold.recv();
        }));
        assert!(futures_util::poll!(&mut storing).is_pending());
        held.push((let_go, storing));
    }
    let manifest = r#"{"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": "sha256:DIGEST"}]}"#;
    let manifest = manifest.replace("DIGEST", &"0".repeat(64));
    let Manifest::Image(image) = Manifest::parse(manifest.as_bytes(), "").unwrap() else {
        panic!("an index")
    };
    let pulled = Pulled { digest: String::new(), index: None, image: Ok(image) };
    let pulling = tokio::time::timeout(Duration::from_secs(20), registry.module(pulled));
    let why = pulling.await.expect("it ends").err().unwrap();
    assert!(why.to_string().contains("deadline exceeded"), "{why}");
}

async fn at<'a>(web: &'a Web, reference: &'a Reference, server: &Server) -> Registry<'a> {
    let (secret, until) = (Secret::Given("{}".to_owned().into()), Instant::now() + Duration::from_secs(20));
    let mut registry = Registry::new(web, reference, &secret, until).await.unwrap();
    registry.base = format!("http://{}", server.addr);
    registry
}

#[tokio::test]
async fn a_token_that_has_ended_is_replaced_once() {
    let server = Server::start(|head| {
        if head.starts_with("GET /token") {
            page(200, "", "{\"token\": \"new\"}")
        } else if head.contains("Bearer new") && head.contains("/good") {
            page(200, "", "layer")
        } else {
            page(401, "WWW-Authenticate: Bearer realm=\"https://r.io/t\"\r\n", "")
        }
    })
    .await;
    let (web, reference) = (web(), Reference::parse("r.io/team/plug").unwrap());
    let mut registry = at(&web, &reference, &server).await;
    registry.authorization = Some(HeaderValue::from_static("Bearer old"));
    assert!(matches!(registry.ask("/good", None).await, Err(Error::Unauthorized(_))), "Basic has one try");
    registry.bearer = Some((format!("{}/token", registry.base), String::new()));
    assert_eq!(registry.ask("/good", None).await.unwrap().status(), StatusCode::OK);
    assert!(matches!(registry.ask("/bad", None).await, Err(Error::Unauthorized(_))));
    assert_eq!(server.heads().len(), 1 + 3 + 3);
}

#[tokio::test]
async fn a_redirect_leads_to_no_address_inside_but_the_registrys_own() {
    let server = Server::start(|head| {
        let port =
            head.split("localhost:").nth(1).and_then(|rest| rest.split("\r\n").next()).unwrap_or_default();
        match head.split(' ').nth(1).unwrap_or_default() {
            "/own" => page(302, "Location: /there\r\n", ""),
            "/inside" => page(302, &format!("Location: http://127.0.0.1:{port}/there\r\n"), ""),
            "/name" => page(302, &format!("Location: http://LOCALHOST:{port}/there\r\n"), ""),
            _ => page(200, "", "layer"),
        }
    })
    .await;
    let (web, reference) = (web(), Reference::parse("r.io/team/plug").unwrap());
    let mut registry = at(&web, &reference, &server).await;
    registry.base = format!("http://localhost:{}", server.addr.port());
    for (path, good) in [("/there", true), ("/own", true), ("/name", true), ("/inside", false)] {
        let asked = registry.ask(path, None).await;
        assert_eq!(asked.is_ok(), good, "{path}: {:?}", asked.err());
    }
}

#[tokio::test]
async fn a_registrys_root_leads_nowhere_inside_either() {
    let inside = Server::start(|_| page(200, "", "")).await;
    let elsewhere = format!("Location: http://127.0.0.1:{}/v2/\r\n", inside.addr.port());
    let server = Server::start(move |_| page(302, &elsewhere, "")).await;
    let (web, reference) =
        (web(), Reference::parse(&format!("localhost:{}/plug", server.addr.port())).unwrap());
    let mut registry = at(&web, &reference, &server).await;
    assert!(registry.open().await.is_err());
    assert!(inside.heads().is_empty(), "{:?}", inside.heads());
}

#[tokio::test]
async fn a_token_server_leads_nowhere_inside() {
    let server = Server::start(|head| {
        let port =
            head.split("localhost:").nth(1).and_then(|rest| rest.split("\r\n").next()).unwrap_or_default();
        match head.split([' ', '?']).nth(1).unwrap_or_default() {
            "/own" => page(302, "Location: /there\r\n", ""),
            "/inside" => page(302, &format!("Location: http://127.0.0.1:{port}/there\r\n"), ""),
            _ => page(200, "", "{\"token\": \"got\"}"),
        }
    })
    .await;
    for (path, good) in [("own", true), ("inside", false)] {
        let given = token("{}", &format!("http://localhost:{}/{path}", server.addr.port())).await;
        assert_eq!(given.is_ok(), good, "{path}: {:?}", given.err());
    }
    assert_eq!(server.heads().len(), 3);
}

#[tokio::test]
async fn a_registry_that_refuses_its_root_without_a_word_is_asked_all_the_same() {
    for (said, opens) in [
        ("", true),
        ("WWW-Authenticate: Negotiate\r\n", true),
        ("WWW-Authenticate: Bearer\r\n", false),
        ("WWW-Authenticate: Bearer service=\"s\"\r\n", false),
        ("WWW-Authenticate: Bearer realm=http://127.0.0.1/\r\n", false),
    ] {
        let server = Server::start(move |_| page(401, said, "")).await;
        let (web, reference) = (web(), Reference::parse(&format!("{}/plug", server.addr)).unwrap());
        let mut registry = at(&web, &reference, &server).await;
        assert_eq!(registry.open().await.is_ok(), opens, "{said}");
    }
}

#[tokio::test]
async fn a_token_server_that_gives_none_is_named() {
    let server = Server::start(|head| match head.split(' ').nth(1).unwrap_or_default() {
        path if path.starts_with("/empty") => page(200, "", "{}"),
        path if path.starts_with("/text") => page(200, "", "s3cret"),
        _ => page(403, "", ""),
    })
    .await;
    for (path, said) in [("empty", "no token"), ("text", "not the JSON"), ("else", "403")] {
        let error = token("{}", &format!("http://{}/{path}", server.addr)).await.unwrap_err();
        let error = error.to_string();
        assert!(error.contains(said) && !error.contains("s3cret"), "{error}");
    }
}
