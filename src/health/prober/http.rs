//! httpGet: a GET, judged by the status of its last answer.

use std::time::Duration;

use ::http::{HeaderMap, HeaderName, HeaderValue, header};

use super::super::Outcome;
use super::{USER_AGENT, authority};
use crate::base::error::chain;
use crate::fetch::{Dialer, Get, url};

/// Where the application is asked.
pub(super) struct Place<'a> {
    pub(super) scheme: &'a str,
    /// Without brackets.
    pub(super) host: &'a str,
    pub(super) port: u32,
    /// A URL reference, of which path and query count.
    pub(super) path: &'a str,
}

pub(super) async fn probe(
    dialer: &Dialer,
    place: &Place<'_>,
    headers: &[(String, String)],
    limit: Duration,
) -> Outcome {
    let target = match url::target_of(place.path) {
        Ok(target) => target,
        Err(bad) => return Outcome::Unknown(format!("unable to parse the path of the probe: {bad}")),
    };
    let address = format!("{}://{}{target}", place.scheme, authority(place.host, place.port));
    // The query may hold a credential, and the outcome goes to the log, to pages and to istiod.
    let shown = url::shown(&address);
    let exchange = async {
        let (headers, host) = sent(headers).map_err(|e| e.to_string())?;
        let get = Get::new(&address).map_err(|e| chain(&e))?;
        let get = get.headers(headers).host(host).dialer(dialer).keep(None);
        get.send().await.map_err(|e| format!("Get {shown:?}: {}", chain(&e)))
    };
    match tokio::time::timeout(limit, exchange).await {
        Ok(Ok(reply)) => match reply.status().as_u16() {
            200..400 => Outcome::Healthy,
            code => Outcome::Unhealthy(format!("status code was not from [200,400), bad code {code}")),
        },
        Ok(Err(why)) => Outcome::Unhealthy(why),
        Err(_) => Outcome::Unhealthy(format!("Get {shown:?}: no answer within {limit:?}")),
    }
}

/// A header that cannot be sent. Its value may be a secret and is not repeated.
#[derive(Debug, thiserror::Error)]
#[error("the probe's header {name:?} has a {what} that HTTP does not allow")]
struct BadHeader {
    name: String,
    what: &'static str,
}

/// The request's headers, and the host it names where that is not the address's.
fn sent(configured: &[(String, String)]) -> Result<(HeaderMap, Option<HeaderValue>), BadHeader> {
    let mut headers = HeaderMap::new();
    for (name, value) in configured {
        let bad = |what| BadHeader { name: name.clone(), what };
        let key: HeaderName = name.parse().map_err(|_| bad("name"))?;
        // Blanks around a value are not part of it.
        let value = value.trim_matches([' ', '\t']);
        headers.append(key, HeaderValue::from_str(value).map_err(|_| bad("value"))?);
    }
    let host = headers.get(header::HOST).filter(|host| !host.is_empty()).cloned();
    // Nor is there a body, whose end an application would wait for.
    for name in [header::HOST, header::CONTENT_LENGTH, header::TRANSFER_ENCODING, header::TRAILER] {
        headers.remove(name);
    }
    if !headers.contains_key(header::USER_AGENT) {
        headers.insert(header::USER_AGENT, HeaderValue::from_static(USER_AGENT));
    }
    Ok((headers, host))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeats_stay_and_the_host_stands_apart() {
        let of = |list: &[(&str, &str)]| {
            let owned: Vec<_> = list.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect();
            sent(&owned)
        };
        let (headers, host) = of(&[("X-A", "1"), ("X-A", "2"), ("Host", "h")]).unwrap();
        assert_eq!(headers.get_all("x-a").iter().count(), 2);
        assert_eq!(host.unwrap(), "h");
        assert_eq!(headers[header::USER_AGENT], USER_AGENT);
        assert_eq!(of(&[("User-Agent", "mine")]).unwrap().0[header::USER_AGENT], "mine");
        let (headers, host) = of(&[("user-agent", "mine"), ("host", "h")]).unwrap();
        assert_eq!((headers.len(), &headers[header::USER_AGENT]), (1, &HeaderValue::from_static("mine")));
        assert_eq!(host.unwrap(), "h");
        let of_a_body = of(&[("content-length", "5"), ("Transfer-Encoding", "chunked"), ("TRAILER", "a")]);
        assert_eq!(of_a_body.unwrap().0.len(), 1, "the agent's name");
        assert!(of(&[("a b", "")]).unwrap_err().to_string().contains("name"));
        assert_eq!(of(&[("a", " b c\t ")]).unwrap().0["a"], "b c");
        assert!(of(&[("a", "secret\n")]).unwrap_err().to_string().contains("value"));
        assert!(!of(&[("a", "secret\n")]).unwrap_err().to_string().contains("secret"));
    }
}
