//! What is said of requests that cannot be read. hyper refuses them by itself, before any handler, with an
//! answer that has no body; Go's server has one, and people see it in `curl`.

/// What an HTTP/2 client begins with (RFC 9113, 3.4), and the same as a request that is answered.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n";
const READABLE: &[u8] = b"PRI * HTTP/1.1\r\n";

/// Makes a request of the first bytes of an HTTP/2 client, for which hyper would close the connection
/// without a word.
pub(super) fn readable_preface(read: &mut [u8]) {
    if read.starts_with(PREFACE) {
        read[..READABLE.len()].copy_from_slice(READABLE);
    }
}

/// The answer in place of hyper's own, where `out` is one.
pub(super) fn spelled_out(out: &[u8]) -> Option<&'static [u8]> {
    let text = match out.get(..13)? {
        b"HTTP/1.1 400 " => BAD,
        b"HTTP/1.1 431 " => LARGE,
        _ => return None,
    };
    // A handler's answer has a body or varies by encoding.
    let head = std::str::from_utf8(out).ok()?.split("\r\n\r\n").next()?.to_ascii_lowercase();
    let own = head.lines().any(|l| l == "content-length: 0") && !head.lines().any(|l| l.starts_with("vary:"));
    own.then_some(text.as_bytes())
}

const BAD: &str = "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n400 Bad Request";
const LARGE: &str = "HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n431 Request Header Fields Too Large";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_hypers_own_refusals_are_replaced() {
        let bad = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
        assert_eq!(spelled_out(bad), Some(BAD.as_bytes()));
        let large = b"HTTP/1.1 431 Too Large\r\nContent-Length: 0\r\n\r\n";
        assert_eq!(spelled_out(large), Some(LARGE.as_bytes()));
        for other in [
            &b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"[..],
            b"HTTP/1.1 400 Bad Request\r\nvary: Accept-Encoding\r\ncontent-length: 0\r\n\r\n",
            b"HTTP/1.1 400 Bad Request\r\ncontent-length: 4\r\n\r\ncontent-length: 0",
            b"HTTP/1.1",
            b"# TYPE",
        ] {
            assert_eq!(spelled_out(other), None);
        }
    }
}
