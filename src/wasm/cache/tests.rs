use std::io::Write;

use super::*;

const NEW: Asker<'_> = Asker { url: "oci://r.io/a:v1", resource: "f1", version: "1", pinned: false };

fn key(checksum: &str) -> Key {
    Key { name: "oci://r.io/a".to_owned(), checksum: checksum.to_owned() }
}

fn download(cache: &Cache) -> Beside {
    let mut file = tempfile::Builder::new().prefix(".d").tempfile_in(cache.dir()).unwrap();
    file.write_all(b"module").unwrap();
    Beside::of(file)
}

fn cache(expiry: Duration) -> (Cache, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    (Cache::new(dir.path().to_owned(), expiry), dir)
}

#[tokio::test]
async fn a_module_is_found_by_name_and_checksum_only() {
    let (cache, dir) = cache(Duration::from_secs(60));
    let file = cache.store(&key("aa"), NEW, download(&cache)).await.unwrap();
    let folder = sha256::of(b"oci://r.io/a");
    assert_eq!(file, dir.path().join(folder).join("aa.wasm"));
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o644);
    assert_eq!(cache.find(&key("aa"), NEW).await, Some(file.clone()));
    assert_eq!(cache.find(&key("bb"), NEW).await, None);
    let other = Key { name: "oci://r.io/b".to_owned(), ..key("aa") };
    assert_eq!(cache.find(&other, NEW).await, None, "the same bytes under another name are another module");
    assert_eq!(
        cache.store(&key("aa"), NEW, download(&cache)).await.unwrap(),
        file,
        "the one that is there stays"
    );
    assert_eq!(
        (cache.count(), std::fs::read_dir(dir.path()).unwrap().count()),
        (1, 1),
        "nothing is left over"
    );
}

#[tokio::test]
async fn what_a_url_was_is_remembered_by_resource_and_version() {
    let (cache, _dir) = cache(Duration::from_secs(60));
    assert_eq!(cache.recall(NEW, true), None);
    cache.store(&key("aa"), NEW, download(&cache)).await.unwrap();
    let aa = Some("aa".to_owned());
    assert_eq!(cache.recall(NEW, false), aa);
    let changed = Asker { version: "2", ..NEW };
    assert_eq!(cache.recall(changed, false), None, "the resource has changed");
    assert_eq!(cache.recall(changed, false), aa, "its version was remembered all the same");
    assert_eq!(cache.recall(Asker { resource: "f2", ..NEW }, true), aa);
    assert_eq!(cache.recall(Asker { resource: "f3", ..NEW }, false), None, "it has never asked");
    let unversioned = Asker { resource: "f4", version: "", ..NEW };
    assert_eq!(cache.recall(unversioned, false), aa, "no version is the version of who has never asked");
    let pinned = Asker { url: "oci://r.io/a@sha256:aa", pinned: true, ..NEW };
    assert!(cache.find(&key("aa"), pinned).await.is_some());
    assert_eq!(cache.recall(pinned, true), None);
}

#[tokio::test]
async fn a_file_that_somebody_removed_is_fetched_again() {
    let (cache, _dir) = cache(Duration::from_secs(60));
    let file = cache.store(&key("aa"), NEW, download(&cache)).await.unwrap();
    std::fs::remove_file(&file).unwrap();
    assert_eq!(cache.find(&key("aa"), NEW).await, None);
    assert_eq!(cache.store(&key("aa"), NEW, download(&cache)).await.unwrap(), file);
    assert!(file.is_file());
}

#[tokio::test(start_paused = true)]
async fn unused_modules_go_with_every_url_that_led_to_them() {
    let (cache, _dir) = cache(Duration::from_secs(60));
    let old = cache.store(&key("aa"), NEW, download(&cache)).await.unwrap();
    let latest = Asker { url: "oci://r.io/a:latest", ..NEW };
    cache.find(&key("aa"), latest).await.unwrap();
    let other = Asker { url: "oci://r.io/a:v2", ..NEW };
    let kept = cache.store(&key("bb"), other, download(&cache)).await.unwrap();
    tokio::time::advance(Duration::from_secs(40)).await;
    cache.find(&key("bb"), other).await.unwrap();
    tokio::time::advance(Duration::from_secs(40)).await;
    cache.purge(std::future::ready(Err(io::Error::other("not now")))).await;
    assert!(old.exists(), "it is not known who names it");
    cache.purge(std::future::ready(Ok(Vec::new()))).await;
    assert!(!old.exists() && kept.exists());
    assert_eq!((cache.recall(NEW, true), cache.recall(latest, true)), (None, None));
    assert!(cache.recall(other, true).is_some());
    assert_eq!(cache.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn what_is_named_elsewhere_is_used() {
    let (cache, _dir) = cache(Duration::from_secs(60));
    let file = cache.store(&key("aa"), NEW, download(&cache)).await.unwrap();
    let configs = || vec![Bytes::new(), format!("\x12\x10{}\x1a", file.display()).into()];
    for _ in 0..2 {
        tokio::time::advance(Duration::from_secs(61)).await;
        cache.purge(std::future::ready(Ok(configs()))).await;
        assert!(file.exists());
    }
    // From now on nobody names it, which is its use for the last time.
    tokio::time::advance(Duration::from_secs(60)).await;
    cache.purge(std::future::ready(Ok(Vec::new()))).await;
    assert!(file.exists());
    tokio::time::advance(Duration::from_secs(1)).await;
    cache.purge(std::future::ready(Ok(Vec::new()))).await;
    assert!(!file.exists());
}

#[tokio::test]
async fn without_its_folder_nothing_is_stored() {
    let (cache, dir) = cache(Duration::from_secs(60));
    let file = download(&cache);
    let cache = Cache::new(dir.path().join("missing"), Duration::from_secs(60));
    let error = cache.store(&key("aa"), NEW, file).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotFound);
    assert_eq!((cache.count(), std::fs::read_dir(dir.path()).unwrap().count()), (0, 0));
}

#[tokio::test]
async fn of_a_url_so_many_resources_are_remembered() {
    let (cache, _dir) = cache(Duration::from_secs(60));
    cache.store(&key("aa"), NEW, download(&cache)).await.unwrap();
    let versions = |cache: &Cache| cache.state().urls[NEW.url].versions.len();
    for n in 2..=RESOURCES {
        cache.recall(Asker { resource: &format!("f{n}"), ..NEW }, true);
        assert_eq!(versions(&cache), n);
    }
    assert!(cache.recall(NEW, false).is_some(), "it is among them");
    assert!(
        cache.recall(Asker { resource: "one more", ..NEW }, true).is_some(),
        "what the URL is stays known"
    );
    assert_eq!(versions(&cache), 1);
    assert_eq!(cache.recall(NEW, false), None, "as if it had never asked");
    assert!(cache.find(&key("aa"), NEW).await.is_some());
}

#[tokio::test]
async fn who_saw_that_a_file_is_gone_takes_nothing_from_who_stored_it_anew() {
    let (cache, _dir) = cache(Duration::from_secs(60));
    let file = cache.store(&key("aa"), NEW, download(&cache)).await.unwrap();
    let seen = Arc::clone(&cache.state().modules[&key("aa")].file);
    // Two look at once; the first has fetched it before the second has its answer.
    std::fs::remove_file(&file).unwrap();
    cache.store(&key("aa"), NEW, download(&cache)).await.unwrap();
    cache.forget(&key("aa"), &seen);
    assert_eq!(cache.find(&key("aa"), NEW).await, Some(file));
}
