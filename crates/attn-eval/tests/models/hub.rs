//! A server of one model, as huggingface.co answers: plain HTTP on this machine.

use std::{
    collections::HashMap,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread,
};

/// Paths that were asked for, in order.
pub type Log = Arc<Mutex<Vec<String>>>;

/// Serves files of the model `someone/tiny` until the test ends; gives the address.
pub fn serve(files: HashMap<String, Vec<u8>>) -> (String, Log) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let log = Log::default();
    let asked = Arc::clone(&log);
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            // A client that is gone is the program's matter.
            let _ = answer(stream, &files, &asked);
        }
    });
    (address, log)
}

fn answer(
    mut stream: TcpStream,
    files: &HashMap<String, Vec<u8>>,
    log: &Log,
) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let request = lines.next().unwrap_or(Ok(String::new()))?;
    let headers = lines.map_while(Result::ok).take_while(|l| !l.is_empty());
    let range = headers
        .filter_map(|line| {
            let line = line.to_ascii_lowercase();
            Some(line.strip_prefix("range: bytes=")?.to_owned())
        })
        .last();
    let path = request.split(' ').nth(1).unwrap_or_default().to_owned();
    log.lock().unwrap().push(path.clone());
    let list = "/api/models/someone/tiny/revision/main";
    if path == list {
        let names = files
            .keys()
            .map(|name| format!(r#"{{"rfilename":"{name}"}}"#));
        let names: Vec<_> = names.collect();
        let body = format!(r#"{{"sha":"c0ffee","siblings":[{}]}}"#, names.join(","));
        return respond(&mut stream, "200 OK", "", body.as_bytes());
    }
    let file = path.strip_prefix("/someone/tiny/resolve/main/");
    let Some(bytes) = file.and_then(|name| files.get(name)) else {
        return respond(&mut stream, "404 Not Found", "", b"there is no such file");
    };
    let of = bytes.len();
    let (first, last) = range
        .as_deref()
        .and_then(|range| range.split_once('-'))
        .map_or((0, of - 1), |(first, last)| {
            (first.parse().unwrap_or(0), last.parse().unwrap_or(of - 1))
        });
    let part = &bytes[first..=last.min(of - 1)];
    let headers = format!(
        "Content-Range: bytes {first}-{last}/{of}\r\nETag: \"{}\"\r\nX-Repo-Commit: c0ffee\r\nAccept-Ranges: bytes\r\n",
        path.replace('/', "-")
    );
    respond(&mut stream, "206 Partial Content", &headers, part)
}

fn respond(
    stream: &mut TcpStream,
    status: &str,
    headers: &str,
    body: &[u8],
) -> std::io::Result<()> {
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\n{headers}Content-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body)
}
