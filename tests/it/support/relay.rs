//! A TCP relay in front of PostgreSQL that can fall silent without closing anything, as a network does.

use std::sync::{Arc, Mutex};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinHandle,
};

/// See the module.
pub struct Relay {
    /// Where it listens.
    pub port: u16,
    state: Arc<Mutex<State>>,
    task: JoinHandle<()>,
}

#[derive(Default)]
struct State {
    silent: bool,
    ways: Vec<Way>,
}

/// One connection.
struct Way {
    is_listener: bool,
    silent: watch::Sender<bool>,
}

impl Relay {
    /// Starts one to a port on this machine.
    pub async fn start(to: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let state: Arc<Mutex<State>> = Arc::default();
        let shared = Arc::clone(&state);
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(carry(client, to, Arc::clone(&shared)));
            }
        });
        Self { port, state, task }
    }

    /// Nothing passes any more, on old connections and new ones.
    pub fn fall_silent(&self) {
        self.set(true);
    }

    /// Everything passes again, also what was held back.
    pub fn speak(&self) {
        self.set(false);
    }

    /// Nothing passes on the connections that listen for notifications now; new ones work.
    pub fn silence_listeners(&self) {
        for way in self.state.lock().unwrap().ways.iter().filter(|way| way.is_listener) {
            way.silent.send_replace(true);
        }
    }

    fn set(&self, silent: bool) {
        let mut state = self.state.lock().unwrap();
        state.silent = silent;
        for way in &state.ways {
            way.silent.send_replace(silent);
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn carry(mut client: TcpStream, to: u16, state: Arc<Mutex<State>>) {
    // The first message names the program.
    let mut first = vec![0; 16 * 1024];
    let Ok(size) = client.read(&mut first).await else { return };
    first.truncate(size);
    let is_listener = String::from_utf8_lossy(&first).contains("queen-proxy-listen");
    let silent = {
        let mut state = state.lock().unwrap();
        let (sender, receiver) = watch::channel(state.silent);
        state.ways.push(Way { is_listener, silent: sender });
        receiver
    };
    let Ok(mut server) = TcpStream::connect(("127.0.0.1", to)).await else { return };
    wait(silent.clone()).await;
    if server.write_all(&first).await.is_err() {
        return;
    }
    let (from_client, to_client) = client.split();
    let (from_server, to_server) = server.split();
    tokio::select! {
        () = pump(from_client, to_server, silent.clone()) => {}
        () = pump(from_server, to_client, silent) => {}
    }
}

async fn pump(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    silent: watch::Receiver<bool>,
) {
    let mut piece = vec![0; 16 * 1024];
    while let Ok(size) = from.read(&mut piece).await {
        wait(silent.clone()).await;
        if size == 0 || to.write_all(&piece[..size]).await.is_err() {
            return;
        }
    }
}

async fn wait(mut silent: watch::Receiver<bool>) {
    let _ = silent.wait_for(|silent| !silent).await;
}
