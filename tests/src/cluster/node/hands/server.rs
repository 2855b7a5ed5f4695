//! The node's side of the hands.

use std::io::{BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

use super::{Answer, End, NodeFacts, Output, Request, read_line, write_line};
use crate::cluster::addresses;
use crate::cluster::node::{images, processes};
use crate::cluster::poll::until;
use crate::cluster::service::Service;

/// Answers the harness for as long as the node runs.
pub(in crate::cluster::node) fn serve(
    address: &str,
    services: &Arc<Vec<Arc<Service>>>,
    facts: &Arc<Mutex<NodeFacts>>,
) -> Result<()> {
    let listener =
        TcpListener::bind((address, addresses::HANDS_PORT)).context("listen for the harness")?;
    for stream in listener.incoming() {
        let stream = stream.context("accept a connection")?;
        // Pods can reach this address, too.
        let peer = stream.peer_addr().map(|peer| peer.ip().to_string());
        if peer.is_ok_and(|peer| peer != addresses::MANAGEMENT_HOST) {
            continue;
        }
        let server = Server {
            services: Arc::clone(services),
            facts: Arc::clone(facts),
        };
        thread::spawn(move || {
            // The other side sees a lost connection by itself.
            let _ = server.answer(stream);
        });
    }
    Ok(())
}

struct Server {
    services: Arc<Vec<Arc<Service>>>,
    facts: Arc<Mutex<NodeFacts>>,
}

impl Server {
    fn answer(&self, mut stream: TcpStream) -> Result<()> {
        let mut reader = BufReader::new(stream.try_clone().context("share the connection")?);
        let request = read_line(&mut reader)?;
        if let Request::Run { argv, stdin, bound } = request {
            let mut input = vec![0; stdin];
            reader.read_exact(&mut input).context("read the input")?;
            return send_output(&mut stream, run(&argv, input, bound));
        }
        let answer = self.act(request);
        write_line(
            &mut stream,
            &answer.unwrap_or_else(|error| Answer::Failed(format!("{error:#}"))),
        )
    }

    fn act(&self, request: Request) -> Result<Answer> {
        match request {
            Request::Run { .. } => unreachable!("answered with its bytes"),
            Request::SignalMatching { pattern, signal } => {
                let pids = processes::matching(&pattern)?;
                pids.iter().try_for_each(|&pid| send_signal(pid, signal))?;
                return Ok(Answer::Pids(pids));
            }
            Request::Signal { pid, signal } => send_signal(pid, signal)?,
            Request::Service { name, action } => {
                let service = self.services.iter().find(|service| service.name() == name);
                service
                    .with_context(|| format!("no service {name}"))?
                    .act(action)?;
            }
            Request::Import { archive } => images::import(&archive)?,
            Request::Facts => {
                let mut facts = self
                    .facts
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .clone();
                facts.services = self
                    .services
                    .iter()
                    .map(|service| service.status())
                    .collect();
                return Ok(Answer::Facts(facts));
            }
        }
        Ok(Answer::Done)
    }
}

fn send_output(stream: &mut TcpStream, output: Result<Output>) -> Result<()> {
    match output {
        Ok(Output {
            end,
            stdout,
            stderr,
        }) => {
            let answer = Answer::Ran {
                end,
                stdout: stdout.len(),
                stderr: stderr.len(),
            };
            write_line(stream, &answer)?;
            stream.write_all(&stdout).context("send the output")?;
            stream.write_all(&stderr).context("send the error output")
        }
        Err(error) => write_line(stream, &Answer::Failed(format!("{error:#}"))),
    }
}

fn send_signal(pid: i32, signal: i32) -> Result<()> {
    let signal = Signal::try_from(signal).with_context(|| format!("signal {signal}"))?;
    match kill(Pid::from_raw(pid), signal) {
        // It has ended in between: what was asked for is so.
        Ok(()) | Err(Errno::ESRCH) => Ok(()),
        Err(error) => Err(error).with_context(|| format!("{signal} to {pid}")),
    }
}

/// Runs a command in a process group of its own; past its bound the group is killed.
fn run(argv: &[String], input: Vec<u8>, bound: Duration) -> Result<Output> {
    let (program, arguments) = argv.split_first().context("no command to run")?;
    let mut child = Command::new(program)
        .args(arguments)
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .with_context(|| format!("run {program}"))?;
    let stdin = child.stdin.take();
    // A command may end without reading its input.
    thread::spawn(move || stdin.map(|mut stdin| stdin.write_all(&input)));
    let stdout = read_in_background(child.stdout.take());
    let stderr = read_in_background(child.stderr.take());
    let end = wait(&mut child, bound)?;
    let collect = |reader: thread::JoinHandle<Vec<u8>>| reader.join().unwrap_or_default();
    Ok(Output {
        end,
        stdout: collect(stdout),
        stderr: collect(stderr),
    })
}

fn read_in_background(stream: Option<impl Read + Send + 'static>) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // What was read before an error is what there is.
        let _ = stream.map(|mut stream| stream.read_to_end(&mut bytes));
        bytes
    })
}

fn wait(child: &mut Child, bound: Duration) -> Result<End> {
    let ended = until("end of the command", bound, || {
        child.try_wait().context("wait for the command")
    });
    if let Ok(status) = ended {
        let signal = status.signal().unwrap_or_default();
        return Ok(status.code().map_or(End::Signaled(signal), End::Exited));
    }
    let group = Pid::from_raw(i32::try_from(child.id()).context("pid out of range")?);
    killpg(group, Signal::SIGKILL).context("kill the command")?;
    child.wait().context("wait for the command")?;
    Ok(End::TimedOut)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUND: Duration = Duration::from_secs(10);

    fn shell(script: &str, input: &str, bound: Duration) -> Output {
        let argv = ["sh", "-c", script].map(str::to_owned);
        run(&argv, input.as_bytes().to_vec(), bound).unwrap()
    }

    #[test]
    fn a_command_gets_its_input_and_gives_both_outputs() {
        let output = shell("cat; echo trouble >&2; exit 3", "words", BOUND);
        assert_eq!(output.end, End::Exited(3));
        assert_eq!(output.stdout, b"words");
        assert_eq!(output.stderr, b"trouble\n");
    }

    #[test]
    fn a_signal_is_told_from_an_exit() {
        assert_eq!(shell("kill -9 $$", "", BOUND).end, End::Signaled(9));
    }

    #[test]
    fn past_its_bound_a_command_is_killed_with_its_children() {
        let output = shell("echo before; sleep 1000 & wait", "", Duration::from_secs(3));
        // The outputs only end when all that hold them have.
        assert_eq!(output.end, End::TimedOut);
        assert_eq!(output.stdout, b"before\n");
    }

    #[test]
    fn a_program_that_is_not_there_is_an_error() {
        assert!(run(&["no-such-program".to_owned()], Vec::new(), BOUND).is_err());
    }
}
