//! Tests of `inferno health`.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::Output;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use tempfile::TempDir;

use super::client::{Server, endless};
use crate::support::program::{assert_fails, inferno, run, text};

/// Runs `inferno health` with arguments and environment variables.
fn run_with(args: &[&str], variables: &[(&str, &str)]) -> Output {
    let home = TempDir::new().unwrap();
    inferno(&home).arg("health").args(args).envs(variables.iter().copied()).output().unwrap()
}

#[test]
fn a_ready_server_is_healthy() {
    let server = Server::start(&["--api-key", "k"]);
    let port = server.address.rsplit(':').next().unwrap();
    let url = format!("http://{}", server.address);
    for args in [
        &["--port", port][..],
        &["--port", port, "--live"],
        &["--host", "0.0.0.0", "--port", port],
        &["--url", &url],
        &["--url", &format!("{url}/v1/")],
    ] {
        let output = run_with(args, &[]);
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        let word = if args.contains(&"--live") { "alive" } else { "ready" };
        assert_eq!(text(&output.stdout), format!("{url} is {word}\n"));
    }
    // The health check must ignore proxy settings in the environment.
    assert!(run_with(&["--port", port], &[("HTTP_PROXY", "http://127.0.0.1:9")]).status.success());
}

#[test]
fn the_address_comes_from_the_settings_of_the_server() {
    let server = Server::start(&[]);
    let port = server.address.rsplit(':').next().unwrap();
    let folder = TempDir::new().unwrap();
    let config = folder.path().join("config.toml");
    std::fs::write(&config, format!("port = {port}\ncontext = 300\n")).unwrap();
    let config = ("INFERNO_CONFIG", config.to_str().unwrap());
    // Kubernetes sets INFERNO_PORT to a URL if a service is named `inferno`. This variable must have no effect.
    let variables = [config, ("INFERNO_HOST", "0.0.0.0"), ("INFERNO_PORT", "tcp://10.0.0.1:8000")];
    assert!(run_with(&[], &variables).status.success());
    let output = run_with(&["--port", "9"], &[config]);
    assert_fails(&output, 1, &["cannot reach http://127.0.0.1:9/health"]);
}

#[test]
fn a_server_that_drains_is_alive_but_not_ready() {
    let mut server = Server::start(&[]);
    let url = format!("http://{}", server.address);
    let stream = server.begin("/v1/chat/completions", &endless(true));
    server.wait("the request is running", |server| server.metric("inferno_num_requests_running") == 1.0);
    server.signal(Signal::SIGTERM);
    server.wait("the server is draining", |server| server.get("/health").status == 503);
    let output = run(&["health", "--url", &url]);
    assert_fails(&output, 1, &[&format!("{url} is not ready: the server is shutting down (status 503)")]);
    assert!(run(&["health", "--url", &url, "--live"]).status.success());
    drop(stream);
    assert_eq!(server.exit_code(), Some(0));
    assert_fails(&run(&["health", "--url", &url]), 1, &["cannot reach"]);
}

#[test]
fn a_server_that_does_not_respond_is_unhealthy_after_the_timeout() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let started = Instant::now();
    let output = run(&["health", "--url", &url, "--timeout", "0.3"]);
    assert_fails(&output, 1, &["no response in 0.3 s"]);
    assert!(started.elapsed() < Duration::from_secs(20));
    // Accept and drop the connection of the check above, which is still in the backlog.
    drop(listener.accept().unwrap());
    let other = thread::spawn(move || {
        let mut stream = BufReader::new(listener.accept().unwrap().0);
        let mut line = String::new();
        while stream.read_line(&mut line).unwrap() > 2 {
            line.clear();
        }
        let response = b"HTTP/1.1 302 Found\r\nLocation: /login\r\nContent-Length: 5\r\n\r\nlogin";
        stream.get_mut().write_all(response).unwrap();
    });
    assert_fails(&run(&["health", "--url", &url]), 1, &["no error message", "(status 302)"]);
    other.join().unwrap();
}

#[test]
fn invalid_arguments_are_usage_errors() {
    assert_fails(&run(&["health", "--url", "localhost:8000"]), 2, &["--url", "http://127.0.0.1:8000"]);
    assert_fails(&run(&["health", "--url", "http://a", "--port", "1"]), 2, &["--port"]);
    assert_fails(&run(&["health", "--timeout", "0"]), 2, &["seconds"]);
}
