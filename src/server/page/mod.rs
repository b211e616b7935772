//! The chat page at `/`, which also shows a live view of the server. The files of the page are embedded in the binary.

use std::sync::LazyLock;

use axum::Router;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, IF_NONE_MATCH, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use ring::digest::{SHA256, digest};

/// The content security policy of the chat page. Allows only requests to this server, and images in `data:` URLs.
/// Forbids inline scripts, and keeps scripts from turning text into HTML (Trusted Types).
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; \
                      trusted-types 'none'";

/// The HTML file that the server returns at `/`.
const INDEX: &str = "index.html";

/// The name and the content of a file of the chat page.
type PageFile = (&'static str, &'static str);

macro_rules! file {
    ($name:literal) => {
        ($name, include_str!($name))
    };
}

/// The embedded files of the chat page.
const FILES: [PageFile; 22] = [
    file!("index.html"),
    file!("api.js"),
    file!("app.js"),
    file!("chat.js"),
    file!("composer.js"),
    file!("conversation.js"),
    file!("conversation_list.js"),
    file!("dom.js"),
    file!("key.js"),
    file!("markdown.js"),
    file!("markdown_blocks.js"),
    file!("markdown_inline.js"),
    file!("messages.js"),
    file!("metrics.js"),
    file!("search.js"),
    file!("server_view.js"),
    file!("settings.js"),
    file!("sse.js"),
    file!("store.js"),
    file!("style.css"),
    file!("text.js"),
    file!("toast.js"),
];

/// The version of the chat page: a hash of all its files. Browsers download a file again only if the version changes.
static VERSION: LazyLock<String> = LazyLock::new(|| {
    let all: String = FILES.iter().map(|(_, content)| *content).collect();
    let hash = digest(&SHA256, all.as_bytes());
    let hex: String = hash.as_ref()[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("\"{hex}\"")
});

/// Creates a route for each file of the chat page.
pub fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    let route = |router: Router<S>, file: PageFile| {
        router.route(&path(file.0), get(move |headers: HeaderMap| async move { answer(file, &headers) }))
    };
    FILES.into_iter().fold(Router::new(), route)
}

/// Returns whether a path is the path of a file of the chat page.
/// The files of the chat page need no API key, because they contain no user data.
pub fn is_page(request_path: &str) -> bool {
    FILES.iter().any(|(name, _)| path(name) == request_path)
}

/// Returns the URL path of a file of the chat page. The HTML file is at `/`.
fn path(name: &str) -> String {
    format!("/{}", if name == INDEX { "" } else { name })
}

fn answer((name, content): PageFile, headers: &HeaderMap) -> Response {
    let kind = match name.rsplit_once('.') {
        Some((_, "css")) => "text/css; charset=utf-8",
        Some((_, "js")) => "text/javascript; charset=utf-8",
        _ => "text/html; charset=utf-8",
    };
    let version = VERSION.as_str();
    let is_current = headers.get(IF_NONE_MATCH).is_some_and(|known| known == version);
    let (status, content) = if is_current { (StatusCode::NOT_MODIFIED, "") } else { (StatusCode::OK, content) };
    let headers = [
        (CONTENT_TYPE, kind),
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        (CACHE_CONTROL, "no-cache"),
        (ETAG, version),
    ];
    (status, headers, content).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_the_folder_is_served() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/server/page");
        let mut names: Vec<_> =
            std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.retain(|name| name != "mod.rs");
        names.sort();
        let mut served = FILES.map(|(name, _)| name.to_string());
        served.sort();
        assert_eq!(names, served);
        assert!(is_page("/") && is_page("/app.js") && !is_page("/index.html") && !is_page("/v1/models"));
    }
}
