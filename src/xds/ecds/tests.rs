use envoy_types::pb::envoy::config::core::v3::TypedExtensionConfig;
use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryResponse, DiscoveryResponse, Resource};
use envoy_types::pb::google::protobuf::Any;

use super::*;
use crate::xds::types;

fn any(name: &str) -> Any {
    let config = TypedExtensionConfig { name: name.to_owned(), ..Default::default() };
    Any { type_url: types::ECDS.to_owned(), value: config.encode_to_vec() }
}

fn sotw(nonce: &str, names: &[&str]) -> Bytes {
    let resources = names.iter().map(|n| any(n)).collect();
    let nonce = nonce.to_owned();
    DiscoveryResponse { resources, nonce, ..Default::default() }.encode_to_vec().into()
}

fn names(response: &Bytes) -> Vec<String> {
    let response = DiscoveryResponse::decode(response.clone()).unwrap();
    let name = |a: &Any| TypedExtensionConfig::decode(&*a.value).unwrap().name;
    response.resources.iter().map(name).collect()
}

#[test]
fn an_older_response_never_overtakes() {
    let mut order = Order::default();
    let (old, new) = (order.begin(), order.begin());
    let passed = order.finish(new, Protocol::Sotw, sotw("2", &["a", "b"])).unwrap();
    order.ended(new);
    assert_eq!(names(&passed), ["a", "b"]);
    let late = order.finish(old, Protocol::Sotw, sotw("1", &["a", "c"])).unwrap();
    order.ended(old);
    assert_eq!(names(&late), ["c"], "a is newer already");
    assert!(order.passed.is_empty(), "nothing is remembered once nothing is under way");
}

#[test]
fn a_response_of_which_nothing_is_left_does_not_arrive() {
    let mut order = Order::default();
    let (old, new) = (order.begin(), order.begin());
    order.finish(new, Protocol::Sotw, sotw("2", &["a"])).unwrap();
    order.ended(new);
    assert_eq!(order.finish(old, Protocol::Sotw, sotw("1", &["a"])), None);
    let next = order.begin();
    assert_eq!(
        order.finish(next, Protocol::Sotw, sotw("3", &[])),
        Some(sotw("3", &[])),
        "an empty one passes"
    );
}

#[test]
fn removals_count_as_news() {
    let mut order = Order::default();
    let (old, new) = (order.begin(), order.begin());
    let removal = DeltaDiscoveryResponse { removed_resources: vec!["a".to_owned()], ..Default::default() };
    order.finish(new, Protocol::Delta, removal.encode_to_vec().into()).unwrap();
    order.ended(new);
    let resource = Resource { name: "a".to_owned(), resource: Some(any("a")), ..Default::default() };
    let late = DeltaDiscoveryResponse { resources: vec![resource], ..Default::default() };
    assert_eq!(order.finish(old, Protocol::Delta, late.encode_to_vec().into()), None);
}

#[test]
fn bodies_are_replaced_and_the_rest_stays() {
    let resource = Resource {
        name: "a".to_owned(),
        version: "7".to_owned(),
        aliases: vec!["x".to_owned()],
        resource: Some(any("a")),
        ..Default::default()
    };
    let mut response = DeltaDiscoveryResponse {
        resources: vec![resource],
        nonce: "n".to_owned(),
        removed_resources: vec!["gone".to_owned()],
        ..Default::default()
    };
    let mut raw = response.encode_to_vec();
    let unknown = [0xc2, 0x3e, 0x03, b'a', b'b', b'c'];
    raw.extend_from_slice(&unknown);
    let made = map_resources(Protocol::Delta, &raw.into(), |_| Ok(any("b").encode_to_vec().into())).unwrap();
    assert!(made.ends_with(&unknown));
    response.resources[0].resource = Some(any("b"));
    assert_eq!(DeltaDiscoveryResponse::decode(made).unwrap(), response);
}

#[test]
fn a_resource_without_a_body_has_an_empty_one() {
    let resources =
        vec![Resource { name: "a".to_owned(), ttl: Some(Default::default()), ..Default::default() }];
    let response = DeltaDiscoveryResponse { resources, ..Default::default() }.encode_to_vec().into();
    let mut bodies = Vec::new();
    let made = map_resources(Protocol::Delta, &response, |body| {
        bodies.push(body.clone());
        Ok(body)
    });
    assert_eq!((bodies, made.unwrap()), (vec![Bytes::new()], response));
}

#[derive(Debug)]
struct Defective;

impl Convert for Defective {
    fn convert(
        &self,
        _: Protocol,
        _: Bytes,
    ) -> futures_util::future::BoxFuture<'static, Result<Bytes, crate::base::error::BoxError>> {
        Box::pin(async { panic!("injected") })
    }
}

#[tokio::test]
async fn a_defect_in_a_conversion_refuses_the_response() {
    let mut all = Conversions::new(Protocol::Sotw, Some(Arc::new(Defective)));
    all.begin("7".to_owned(), sotw("7", &["a"])).unwrap();
    let (nonce, why) = std::future::poll_fn(|cx| all.poll(cx)).await.unwrap_err();
    assert_eq!(nonce, "7");
    assert!(why.contains("panicked"), "{why}");
}

#[derive(Debug)]
struct Hanging(tokio::sync::watch::Sender<()>);

impl Convert for Hanging {
    fn convert(
        &self,
        _: Protocol,
        response: Bytes,
    ) -> futures_util::future::BoxFuture<'static, Result<Bytes, crate::base::error::BoxError>> {
        let mut over = self.0.subscribe();
        Box::pin(async move {
            over.changed().await?;
            Ok(response)
        })
    }
}

#[tokio::test]
async fn where_much_is_being_converted_the_next_response_is_refused() {
    let large = Bytes::from(vec![0; HELD / 2 + 1]);
    for (most, response) in [(MOST, sotw("1", &["a"])), (1, large)] {
        let hanging = Arc::new(Hanging(tokio::sync::watch::Sender::new(())));
        let mut all = Conversions::new(Protocol::Sotw, Some(hanging.clone()));
        for n in 0..most {
            all.begin(n.to_string(), response.clone()).unwrap();
        }
        let why = all.begin("late".to_owned(), response.clone()).unwrap_err().to_string();
        assert!(why.starts_with(&format!("{most} extension configs")), "{why}");
        while all.count > 0 {
            hanging.0.send_replace(());
            let _ = std::future::poll_fn(|cx| Poll::Ready(all.poll(cx))).await;
            tokio::task::yield_now().await;
        }
        assert_eq!(all.held, 0);
        all.begin("next".to_owned(), response).unwrap();
    }
}

#[tokio::test]
async fn names_that_have_passed_count_as_long_as_anything_is_under_way() {
    let hanging = Arc::new(Hanging(tokio::sync::watch::Sender::new(())));
    let mut all = Conversions::new(Protocol::Sotw, Some(hanging.clone()));
    all.begin("slow".to_owned(), sotw("1", &["a"])).unwrap();
    let newer = all.order.begin();
    all.order.finish(newer, Protocol::Sotw, sotw("2", &[&"b".repeat(HELD)]));
    all.order.ended(newer);
    assert!(all.begin("late".to_owned(), sotw("3", &["c"])).is_err());
    while all.count > 0 {
        hanging.0.send_replace(());
        let _ = std::future::poll_fn(|cx| Poll::Ready(all.poll(cx))).await;
        tokio::task::yield_now().await;
    }
    all.begin("next".to_owned(), sotw("4", &["c"])).unwrap();
}
