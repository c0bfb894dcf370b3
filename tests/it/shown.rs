//! No type that holds a secret prints it, and each wipes it.

use std::path::Path;
use std::sync::Arc;

use pilot_agent::testing::istiod::auth::{CallHeaders, Token, TokenFile};
use pilot_agent::testing::secrets::{FirstKey, Identity, Secret};
use pilot_agent::testing::tls::keys::{Algorithm, Curve, Key, KeyOptions, generate};
use zeroize::Zeroizing;

/// Compiles only for what is wiped when dropped.
fn wiped<T: zeroize::Zeroize>(of: &Zeroizing<T>) -> &T {
    of
}

/// The text, and its bytes as `Debug` prints them.
fn assert_hidden(printed: &str, secret: &str) {
    let numbers = secret.bytes().skip(30).take(8).map(|b| b.to_string()).collect::<Vec<_>>().join(", ");
    let part = &secret[30..46];
    assert!(!printed.contains(part) && !printed.contains(&numbers), "{printed}");
}

#[test]
fn values_that_hold_a_secret_do_not_print_it() {
    for algorithm in [Algorithm::Rsa(2048), Algorithm::Ecdsa(Curve::P256), Algorithm::Ecdsa(Curve::P384)] {
        let options = KeyOptions { algorithm, pkcs8: false };
        let key: Key = generate(&options).unwrap();
        let pem = key.to_pem().unwrap();
        let text = wiped(&pem).clone();
        let identity = Identity { chain: b"chain".to_vec(), key: Zeroizing::new(text.clone().into_bytes()) };
        wiped(&identity.key);
        assert_hidden(&format!("{key:?} {identity:?}"), &text);
        let secret = Secret::Identity(Arc::new(identity));
        assert_hidden(&format!("{secret:?} {:#?} {:?}", secret.clone(), FirstKey::begin(options)), &text);
    }
    let text = "e30.eyJzdWIiOiJhIn0.c2lnbmF0dXJlLW9mLWEtdG9rZW4tdGhhdC1pcy1sb25nLWVub3VnaA";
    let token = Token::new(text).unwrap();
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("token"), text).unwrap();
    let clock = Arc::new(pilot_agent::testing::base::clock::System);
    let file = TokenFile::new(dir.path().join("token"), "istio-ca", clock);
    assert!(file.read().is_some());
    assert_hidden(&format!("{token:?} {file:?} {:?}", file.read()), text);
    let extra = vec![("authorization".to_owned(), format!("Bearer {text}"))];
    let headers = CallHeaders { cluster_id: "Kubernetes".to_owned(), extra };
    let mut map = http::HeaderMap::new();
    headers.apply(Some(&token), &mut map).unwrap();
    assert_hidden(&format!("{headers:?} {map:?}"), text);
}

fn sources(dir: &Path, into: &mut Vec<(String, String)>) {
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, into);
        } else if path.extension().is_some_and(|e| e == "rs") {
            into.push((path.display().to_string(), std::fs::read_to_string(&path).unwrap()));
        }
    }
}

/// `Zeroizing` prints what it holds, so whoever has one as a field writes `Debug` by hand or not at all.
#[test]
fn no_type_with_a_wiped_field_derives_debug() {
    let mut all = Vec::new();
    sources(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/src")), &mut all);
    let mut found = 0;
    for (path, text) in &all {
        for field in text.match_indices("Zeroizing<").map(|(at, _)| at) {
            let before = &text[..field];
            // The item it stands in: the last one that begins before it, unless that has ended.
            let begins = [
                "\npub struct ",
                "\nstruct ",
                "\npub enum ",
                "\nenum ",
                "\npub(super) struct ",
                "\npub(crate) struct ",
            ];
            let Some(item) = begins.iter().filter_map(|word| before.rfind(word)).max() else { continue };
            let inside = &before[item..];
            if inside.contains("\n}") || inside.contains(";\n") {
                continue;
            }
            found += 1;
            let attributes = &before[before[..item].rfind("\n\n").unwrap_or(0)..item];
            let name = inside.trim().lines().next().unwrap_or_default();
            let mut derives = attributes.lines().filter(|line| line.starts_with("#[derive"));
            assert!(
                !derives.any(|line| line.contains("Debug")),
                "{path}: {name} derives Debug and holds a secret"
            );
        }
    }
    assert!(found >= 2, "the search finds nothing any more: {found}");
}
